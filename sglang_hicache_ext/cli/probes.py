"""What `doctor` looks at, one small probe each. A probe returns findings and never hangs: the caller bounds it."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from sglang_hicache_ext import __version__
from sglang_hicache_ext.cli.render import size_text
from sglang_hicache_ext.config import MIB


class Severity(IntEnum):
    OK = 0
    INFO = 1
    WARN = 2
    FAIL = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``todo`` says what to change; ``proof`` is how it is known."""

    topic: str
    severity: Severity
    what: str
    todo: str = ""
    proof: dict[str, Any] = field(default_factory=dict)


Probe = Callable[[], Iterator[Finding]]


def versions() -> Iterator[Finding]:
    """Ours, Python, kernel, and SGLang with its support."""
    yield Finding("package", Severity.OK, f"sglang-hicache-ext {__version__}, Python {platform.python_version()}")
    yield Finding("kernel", Severity.OK, f"{platform.system()} {platform.release()} {platform.machine()}")
    from sglang_hicache_ext.sglang_adapter.compat import installed_version, support_of

    version = installed_version("sglang")
    if version is None:
        yield Finding("sglang", Severity.INFO, "SGLang is not installed here", "install it where the server runs")
        return
    known = support_of(version)
    severity = {"tested": Severity.OK, "refused": Severity.FAIL}.get(known.state, Severity.WARN)
    todo = "" if severity is Severity.OK else "run a tested version; docs/compatibility.md lists them"
    yield Finding("sglang", severity, f"SGLang {version}: {known.state} ({known.note})", todo)


def page_hash(
    which: Callable[[str], str | None] = shutil.which,
    built: Path | None = None,
    includes: Sequence[Path] = (Path("/usr/include"), Path("/usr/local/include")),
) -> Iterator[Finding]:
    """Whether SGLang can compile the extension that names pages; it does so at the first start on a machine.

    ``built``: where torch keeps compiled extensions. Source: sglang 0.5.23 srt/mem_cache/cpp_utils/native_hash.py:20-45.
    """
    if importlib.util.find_spec("sglang") is None:
        return
    folder = built or Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions")
    if folder.is_dir() and next(folder.rglob("hicache_hash_cpp.so"), None) is not None:
        yield Finding("page hash", Severity.OK, "SGLang's page hash is compiled")
        return
    missing = [name for name in ("g++", "ninja") if which(name) is None]
    found = [i for i in includes if (i / "openssl/evp.h").exists() or next(i.glob("*/openssl/evp.h"), None) is not None]
    missing += [] if found else ["openssl/evp.h"]
    if missing:
        yield Finding(
            "page hash", Severity.FAIL, f"SGLang compiles its page hash at first use and lacks {', '.join(missing)}",
            "apt install g++ ninja-build libssl-dev",
        )  # fmt: skip
    else:
        yield Finding("page hash", Severity.OK, "SGLang's page hash will be compiled at the first start")


def limits() -> Iterator[Finding]:
    """Locked memory and open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        yield Finding("memlock", Severity.OK, "host memory may be registered")
    else:
        yield Finding(
            "memlock", Severity.INFO, f"RLIMIT_MEMLOCK is {size_text(soft)}: the host pool is not registered",
            "set LimitMEMLOCK=infinity; costs CPU, not correctness",
        )  # fmt: skip
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files >= 1024
    todo = "" if enough else "raise `ulimit -n` to 1024 or more"
    yield Finding("open files", Severity.OK if enough else Severity.WARN, f"RLIMIT_NOFILE is {files}", todo)


def io_uring_switch(sysctl: Path = Path("/proc/sys/kernel/io_uring_disabled")) -> Iterator[Finding]:
    """Whether the kernel has io_uring switched off; the engines' table shows what really works."""
    try:
        value = sysctl.read_text().strip()
    except OSError:
        return
    if value != "0":
        yield Finding(
            "io_uring", Severity.WARN, f"kernel.io_uring_disabled is {value}", "sysctl kernel.io_uring_disabled=0"
        )


def rdma(devices: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    """RDMA devices; their absence is no fault."""
    names = sorted(p.name for p in devices.iterdir()) if devices.is_dir() else []
    text = f"devices: {', '.join(names)}" if names else "no RDMA device; the remote tier would use TCP"
    yield Finding("rdma", Severity.OK if names else Severity.INFO, text)


def file_system_of(path: Path) -> tuple[str, str, str]:
    """(type, mount point, options) of the file system under ``path``. Source: /proc/self/mountinfo, proc(5)."""
    best = ("unknown", "/", "")
    real = os.path.realpath(path)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        fields = head.split()
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[1]):
            best = (tail.split()[0], point, fields[5])
    return best


def directory(path: str, capacity_bytes: int | None) -> Iterator[Finding]:
    """One drive: can it hold a store, what kind of file system is it, is there room, which engines work on it."""
    from sglang_hicache_ext.errors import ConfigError
    from sglang_hicache_ext.storage_backends.nvme.layout import check_directory, existing_capacity

    root = Path(path)
    topic = f"directory {path}"
    if not root.exists():
        yield Finding(topic, Severity.WARN, "does not exist; the server would create it", f"mkdir -m 700 {path}")
        return
    kind, point, options = file_system_of(root)
    proof = {"type": kind, "mount": point, "options": options}
    yield _kind_of_file_system(topic, kind, options, proof)
    try:
        check_directory(path)
    except ConfigError as err:
        yield Finding(topic, Severity.FAIL, err.what, err.todo)
        return
    capacity = capacity_bytes
    if (root / "store.json").exists():
        try:
            capacity = capacity or existing_capacity(root)
            yield Finding(topic, Severity.OK, f"holds a store, capacity {size_text(capacity)}")
        except ConfigError as err:
            yield Finding(topic, Severity.FAIL, err.what, err.todo)
            return
    yield from _room(topic, root, capacity)
    yield from _engines(topic, root)


def _kind_of_file_system(topic: str, kind: str, options: str, proof: dict[str, Any]) -> Finding:
    if "ro" in options.split(","):
        return Finding(topic, Severity.FAIL, f"{kind}, mounted read-only", "mount it read-write", proof)
    if kind in ("tmpfs", "ramfs"):
        return Finding(topic, Severity.WARN, f"{kind}: this is memory, gone after a restart", "use a drive", proof)
    if kind == "overlay":
        return Finding(
            topic, Severity.WARN, "overlay: gone with the container, and slower than the drive",
            "mount a volume of the drive into the container", proof,
        )  # fmt: skip
    if kind.startswith(("nfs", "cifs", "fuse", "9p")):
        return Finding(
            topic,
            Severity.WARN,
            f"{kind}: not a local drive; locks between processes may not hold",
            "use a local drive",
            proof,
        )
    return Finding(topic, Severity.OK, kind, proof=proof)


def _room(topic: str, root: Path, capacity: int | None) -> Iterator[Finding]:
    fs = os.statvfs(root)
    free = fs.f_bavail * fs.f_frsize
    used = sum(e.stat().st_blocks * 512 for e in root.rglob("*") if e.is_file())
    text = f"{size_text(free)} free, {size_text(used)} used here"
    if capacity is not None and free + used < capacity:
        yield Finding(
            topic,
            Severity.WARN,
            f"{text}, less than the capacity {size_text(capacity)}",
            "lower capacity or free the drive",
        )
    elif free < 64 * MIB:
        yield Finding(topic, Severity.FAIL, f"{text}: the drive is full", "free space on the drive")
    else:
        yield Finding(topic, Severity.OK, text)


def _engines(topic: str, root: Path) -> Iterator[Finding]:
    """Move a real page through each engine, in a place of this directory that the store uses itself."""
    from sglang_hicache_ext.storage_backends.engines.probe import AUTO_ORDER, probe_table

    inside = root / "segments" if (root / "segments").is_dir() else root
    table = probe_table(str(inside), timeout_s=5.0)
    chosen = next((p for name in AUTO_ORDER for p in table if p.engine == name and p.ok), None)
    for probe in table:
        proof = {"engine": probe.engine, "errno": probe.errno, "described": probe.described}
        if probe.ok:
            mark = " (auto takes this one)" if probe is chosen else ""
            yield Finding(topic, Severity.OK, f"{probe.engine}: a page was written and read back{mark}", proof=proof)
        else:
            bad = Severity.INFO if probe.engine not in AUTO_ORDER[:2] else Severity.WARN
            yield Finding(topic, bad, f"{probe.engine}: {probe.reason}", proof=proof)
    if chosen is None:
        yield Finding(topic, Severity.FAIL, "no engine can move a page here", "make the directory writable")
    elif chosen.described.get("direct") is False:
        yield Finding(
            topic,
            Severity.WARN,
            "O_DIRECT is refused here: reads go through the page cache",
            "use ext4 or xfs on a drive",
        )
