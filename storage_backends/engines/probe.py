"""Which engine works here: a real page written, read back and compared in the real directory, within a deadline.

No list of file-system names and no kernel version decides: only what happened to the page does.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.storage_backends.engines.base import IoEngine, IoPlan
from sglang_hicache_ext.storage_backends.engines.files import FILE_ALIGN, temporary_name
from sglang_hicache_ext.storage_backends.engines.libc import dio_alignment

AUTO_ORDER = ("io_uring", "posix", "aiofiles")
NAMES = (*AUTO_ORDER, "kvikio")

Opener = Callable[[str, str, int, bool], IoEngine]
"""(name, directory, depth, direct) -> engine; raises OSError or CapabilityError."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What happened to one engine. ``errno`` is 0 when the reason is not an operating-system error."""

    engine: str
    ok: bool
    errno: int = 0
    reason: str = ""
    described: dict[str, Any] = field(default_factory=dict)


def make_engine(name: str, directory: str, depth: int, direct: bool) -> IoEngine:
    """Construct an engine without trying it. Raises OSError, CapabilityError."""
    if name == "io_uring":
        from sglang_hicache_ext.storage_backends.engines.io_uring import IoUringEngine

        return IoUringEngine(depth=depth, direct=direct)
    if name == "posix":
        from sglang_hicache_ext.storage_backends.engines.posix import PosixEngine

        return PosixEngine(direct=direct)
    if name == "kvikio":
        from sglang_hicache_ext.storage_backends.engines.kvikio_engine import KvikioEngine

        return KvikioEngine(directory, depth=depth, direct=direct)
    from sglang_hicache_ext.storage_backends.engines.aiofiles_engine import AiofilesEngine

    return AiofilesEngine(depth=depth)


def open_engine(
    name: str,
    directory: str | Sequence[str],
    *,
    depth: int = 32,
    page_bytes: int = 256 << 10,
    direct: bool = True,
    timeout_s: float = 10.0,
    opener: Opener = make_engine,
) -> IoEngine:
    """Open an engine that moved a real page in every directory.

    Args:
        name: "auto" or one of NAMES. auto takes the first of AUTO_ORDER that works.
        directory: existing directory, or all of them when a store spans several drives.
        depth: operations in flight per calling thread.
        page_bytes: size of the page to try.
        direct: ask for O_DIRECT.
        timeout_s: limit of each try.

    Raises:
        CapabilityError: the engine, or with auto every engine, does not work there; says why and what to do.
    """
    if name not in ("auto", *NAMES):
        raise CapabilityError(f"engine {name!r} is not known", "engine", f"write one of: auto, {', '.join(NAMES)}")
    directories = [directory] if isinstance(directory, str) else list(directory)
    failed = []
    for candidate in AUTO_ORDER if name == "auto" else (name,):
        result, engine = try_engine(candidate, directories, depth, page_bytes, direct, timeout_s, opener)
        if engine is not None:
            return engine
        failed.append(result)
    reasons = "; ".join(f"{probe.engine}: {probe.reason}" for probe in failed)
    todo = "make the directory writable" if name == "auto" else "write engine: auto, or remove the cause"
    raise CapabilityError(f"no page could be written and read back. {reasons}", ", ".join(directories), todo)


def probe_table(
    directory: str,
    *,
    depth: int = 32,
    page_bytes: int = 256 << 10,
    timeout_s: float = 10.0,
    opener: Opener = make_engine,
) -> list[Probe]:
    """Try every engine in ``directory``: the table that diagnosis shows."""
    table = []
    for name in NAMES:
        result, engine = try_engine(name, [directory], depth, page_bytes, True, timeout_s, opener)
        if engine is not None:
            engine.close()
        table.append(result)
    return table


def try_engine(
    name: str,
    directories: Sequence[str],
    depth: int,
    page_bytes: int,
    direct: bool,
    timeout_s: float,
    opener: Opener = make_engine,
) -> tuple[Probe, IoEngine | None]:
    """Construct ``name`` and move a page in each directory; the engine when that worked.

    Everything runs on a daemon thread, so that a directory on a dead mount costs ``timeout_s`` and no more.
    """
    outcome: list[tuple[Probe, IoEngine | None]] = []
    gave_up = threading.Event()

    def work() -> None:
        outcome.append(_try_here(name, directories, depth, page_bytes, direct, timeout_s, opener))
        if gave_up.is_set() and (late := outcome[0][1]) is not None:
            late.close()

    thread = threading.Thread(target=work, name=f"hicache-probe-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s + 1.0 if name != "kvikio" else timeout_s + 31.0)
    gave_up.set()
    if not outcome:
        return Probe(name, False, errno.ETIMEDOUT, f"no answer within {timeout_s} s"), None
    return outcome[0]


def _try_here(
    name: str,
    directories: Sequence[str],
    depth: int,
    page_bytes: int,
    direct: bool,
    timeout_s: float,
    opener: Opener,
) -> tuple[Probe, IoEngine | None]:
    engine: IoEngine | None = None
    try:
        engine = opener(name, directories[0], depth, direct)
        for directory in directories:
            move_page(engine, directory, page_bytes, timeout_s)
        return Probe(name, True, 0, "", engine.describe()), engine
    except OSError as error:
        number, reason = error.errno or 0, _hint(error)
    except CapabilityError as error:
        number, reason = 0, str(error)
    except Exception as error:  # a driver library may raise anything; the page did not move
        number, reason = 0, f"{type(error).__name__}: {error}"
    if engine is not None:
        engine.close()
    return Probe(name, False, number, reason), None


def _hint(error: OSError) -> str:
    text = error.strerror or str(error)
    if "io_uring_setup" in text and error.errno in (errno.EPERM, errno.ENOSYS):
        return f"{text}; blocked by a seccomp profile or by kernel.io_uring_disabled"
    return f"{text}{f' ({error.filename})' if error.filename else ''}"


def move_page(engine: IoEngine, directory: str, page_bytes: int, timeout_s: float) -> None:
    """Write a page, read it back, compare. Raises OSError.

    The file has no name any more when the first byte is written: a process killed here leaves nothing on the disk.
    """
    nbytes = max(FILE_ALIGN, -(-page_bytes // FILE_ALIGN) * FILE_ALIGN)
    path = os.path.join(directory, temporary_name("engine-probe"))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, nbytes)
        handle = engine.open_file(path)
        try:
            os.unlink(path)
            _write_and_compare(engine, handle, nbytes, timeout_s)
        finally:
            engine.close_file(handle)
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _write_and_compare(engine: IoEngine, handle: int, nbytes: int, timeout_s: float) -> None:
    buffer = np.frombuffer(mmap.mmap(-1, 2 * nbytes), np.uint8)
    page, back = buffer[:nbytes], buffer[nbytes:]
    page[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    for memory, call in ((page, engine.write), (back, engine.read)):
        iov = np.array([[memory.ctypes.data, nbytes]], np.uint64)
        plan = IoPlan(np.array([handle], np.int32), np.zeros(1, np.int64), np.array([0, 1], np.int32), iov, buffer)
        moved = int(call(plan, timeout_s).res[0])
        if moved != nbytes:
            number = -moved if -4096 < moved < 0 else errno.EIO
            raise OSError(number, f"{call.__name__} of a page: {os.strerror(number)}")
    if not np.array_equal(page, back):
        raise OSError(errno.EILSEQ, "a page came back with other bytes")


def alignment(path: str) -> tuple[int, int]:
    """(memory, file) alignment in bytes for direct I/O on ``path``; at least FILE_ALIGN for the file.

    Where the kernel does not say (before Linux 6.1), FILE_ALIGN for both.
    """
    known = dio_alignment(path)
    if known is None or known == (0, 0):
        return FILE_ALIGN, FILE_ALIGN
    return known[0], max(known[1], FILE_ALIGN)
