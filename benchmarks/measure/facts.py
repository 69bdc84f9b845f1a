"""Where and with what a result was measured: commit, versions, hardware, file system. Read, never assumed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "sglang-hicache-ext",
    "sglang",
    "torch",
    "numpy",
    "lmdb",
    "xxhash",
    "aiofiles",
    "kvikio-cu12",
    "kvikio-cu13",
    "nixl-cu12",
    "nixl-cu13",
    "mooncake-transfer-engine",
    "triton",
)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def commit() -> dict[str, Any]:
    """Commit of the checkout and whether tracked files differ from it."""
    return {
        "commit": _output("git", "rev-parse", "HEAD"),
        "is_dirty": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
    }


def versions() -> dict[str, str]:
    """Versions of Python, the kernel, fio and every package that can change a result; missing ones left out."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if shutil.which("fio"):
        found["fio"] = _output("fio", "--version").removeprefix("fio-")
    return found


def hardware() -> dict[str, Any]:
    """CPU, cores this process may use, memory, GPUs."""
    info = _text("/proc/cpuinfo")
    model = next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    is_virtual = " hypervisor" in info
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "is_virtual_machine": is_virtual,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": gpus.splitlines(),
        "load_average": os.getloadavg()[0],
    }


def mount_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """The mount that holds ``path``: mount point, file system, source, options."""
    real = os.path.realpath(path)
    best: dict[str, str] = {}
    for line in _text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, source, options) = left.split(), right.split()[:3]
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.get("mount_point", "")):
            best = {
                "mount_point": point,
                "file_system": kind,
                "source": source,
                "options": f"{fields[5]},{options}",
                "device": fields[2],
            }
    return best


def file_system(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Mount, free space and the block device under ``path``."""
    found: dict[str, Any] = dict(mount_of(path))
    usage = shutil.disk_usage(path)
    found |= {"size_bytes": usage.total, "free_bytes": usage.free}
    queue = _queue_dir(found.get("device", ""))
    if queue:
        for name in ("scheduler", "rotational", "logical_block_size", "write_cache", "max_sectors_kb", "nr_requests"):
            found[f"device_{name}"] = _text(f"{queue}/{name}")
        found["device_model"] = _text(f"{queue}/../device/model")
    return found


def _queue_dir(device: str) -> str:
    base = os.path.realpath(f"/sys/dev/block/{device}") if device else ""
    for candidate in (base, os.path.dirname(base)):
        if candidate and os.path.isdir(f"{candidate}/queue"):
            return f"{candidate}/queue"
    return ""


def environment(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Everything above, as written into a result."""
    return {
        **commit(),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "versions": versions(),
        "hardware": hardware(),
        "file_system": file_system(path) if path is not None else {},
    }


def device_line(facts: dict[str, Any]) -> str:
    """One line for a person: "2 vCPU Intel Xeon, 24 GiB, ext4 on /dev/vda (virtio), Linux 6.18"."""
    hw, disk = facts["hardware"], facts["file_system"]
    unit = "vCPU" if hw["is_virtual_machine"] else "cores"
    parts = [f"{hw['cores']} {unit} {hw['cpu']}", f"{hw['memory_bytes'] / (1 << 30):.0f} GiB"]
    parts += hw["gpus"] or ["no GPU"]
    if disk:
        kind = " (virtio)" if "/vd" in disk.get("source", "") else ""
        parts.append(f"{disk.get('file_system', '?')} on {disk.get('source', '?')}{kind}")
    return ", ".join([*parts, f"Linux {platform.release()}"])
