"""Cold is made, then proven: the bytes of a cold read must be seen coming from the block device.

Proof, in this order: ``mincore`` (no page of the files is in the page cache before the read) and
/proc/self/io ``read_bytes`` (what this process really fetched from the device during it). On a file system
without a device (tmpfs) nothing can be cold and the run says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from measure.facts import mount_of
from measure.samples import WarmRead

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

COLD_SHARE = 0.95
"""At least this share of the bytes read must have come from the device."""

MINCORE_FILES = 64
RESIDENT_SHARE = 0.05
"""At most this share of the files may be in the page cache before a cold read."""


def files_below(*roots: str | os.PathLike[str]) -> list[Path]:
    """Every regular file below the directories."""
    return [p for root in roots for p in Path(root).rglob("*") if p.is_file() and not p.is_symlink()]


def drop_page_cache(paths: Sequence[Path], *, sync: bool = True) -> str:
    """Get ``paths`` out of the page cache: file by file, and where that does not do, the whole machine's cache.

    Args:
        paths: what is about to be read.
        sync: write dirty pages back first (the whole machine's); they cannot be dropped before.

    Returns:
        How it was done: "fadvise", "drop_caches", or "fadvise incomplete" when pages stayed and dropping the whole
        cache is not permitted.
    """
    if sync:
        os.sync()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if resident_share(some_of(paths)) <= RESIDENT_SHARE:
        return "fadvise"
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return "fadvise incomplete"
    return "drop_caches"


def some_of(paths: Sequence[Path]) -> Sequence[Path]:
    """About MINCORE_FILES of the files, evenly spread: mincore opens and maps each one."""
    return paths[:: max(1, len(paths) // MINCORE_FILES)]


def resident_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the file that are in the page cache now (mincore)."""
    size = os.stat(path).st_size
    if not size:
        return 0
    fd = os.open(path, os.O_RDONLY)
    try:
        addr = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if addr == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"mmap of {path}")
    finally:
        os.close(fd)
    pages = -(-size // mmap.PAGESIZE)
    flags = np.zeros(pages, np.uint8)
    try:
        if _libc.mincore(addr, size, flags.ctypes.data):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
    finally:
        _libc.munmap(addr, size)
    return int((flags & 1).sum()) * mmap.PAGESIZE


def resident_share(paths: Iterable[Path]) -> float:
    """Share of the files' bytes that are in the page cache now."""
    sizes = [(p, p.stat().st_size) for p in paths]
    total = sum(size for _, size in sizes)
    return sum(resident_bytes(p) for p, _ in sizes) / total if total else 0.0


def process_io() -> tuple[int, int]:
    """(bytes fetched from devices, bytes sent to devices) by this process and its threads so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def device_io(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(read, written) bytes of the block device under ``path`` so far, all processes; zeros without a device."""
    device = mount_of(path).get("device", "")
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if f"{fields[0]}:{fields[1]}" == device:
            return int(fields[5]) * 512, int(fields[9]) * 512
    return 0, 0


@dataclass(slots=True)
class DeviceBytes:
    """Context manager that counts the bytes which moved between the block device and this process."""

    path: str | os.PathLike[str]
    read_bytes: int = 0
    written_bytes: int = 0
    device_read_bytes: int = 0
    _start: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))

    def __enter__(self) -> DeviceBytes:
        self._start = process_io(), device_io(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        now, device = process_io(), device_io(self.path)
        self.read_bytes = now[0] - self._start[0][0]
        self.written_bytes = now[1] - self._start[0][1]
        self.device_read_bytes = device[0] - self._start[1][0]

    def facts(self, wanted_bytes: int) -> dict[str, Any]:
        return {
            "bytes_asked": wanted_bytes,
            "bytes_from_device": self.read_bytes,
            "device_read_bytes": self.device_read_bytes,
        }


def require_cold_files(paths: Sequence[Path]) -> float:
    """Return the resident share; raise WarmRead when the files are still in the page cache."""
    share = resident_share(some_of(paths))
    if share > RESIDENT_SHARE:
        raise WarmRead(f"{share:.0%} of the files are in the page cache, so this is not a cold read")
    return share


def require_cold(wanted_bytes: int, moved: DeviceBytes) -> None:
    """Raise WarmRead unless the wanted bytes came from the block device."""
    seen = max(moved.read_bytes, 0)
    if seen < COLD_SHARE * wanted_bytes:
        kind = mount_of(moved.path).get("file_system", "?")
        raise WarmRead(
            f"only {seen:,} of {wanted_bytes:,} bytes came from the device ({kind} at {moved.path}), "
            "so this is not a cold read"
        )
