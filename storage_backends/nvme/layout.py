"""The store's directories: who may use them, what lies in them, and the sizes derived from the capacity."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hicache_ext.config import GIB, MIB, HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError, StoreError
from sglang_hicache_ext.page import ALIGN, align_up
from sglang_hicache_ext.storage_backends.engines.files import LEFTOVER, temporary_name

FORMAT_VERSION = 1
PRODUCT = "sglang-hicache-ext nvme store"
GRANULE = 16_384
"""Bytes of a segment behind one read mark."""
HEAT_FIXED_BYTES = ALIGN + (1 << 20)
"""Header and evicted history of heat.bin."""
SEGMENT_HEAT_BYTES = 64
SMALL_FILES_BYTES = 256 << 10
"""Set aside for store.json, locks and the namespaces' descriptions."""
MIN_SEGMENTS = 3
"""Per directory: one being written, one kept free for reclaim, one to hold pages."""
OPEN_TIMEOUT_S = 60.0
_OURS = {"store.json", "index", "heat.bin", "segments", "namespaces", "open.lock", "live.lock"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies. All processes on a store agree on every field; ``max_segments`` follows the capacity."""

    roots: tuple[Path, ...]
    store_id: bytes
    segment_bytes: int
    map_bytes: int
    max_segments: int

    @property
    def index_dir(self) -> Path:
        return self.roots[0] / "index"

    @property
    def heat_path(self) -> Path:
        return self.roots[0] / "heat.bin"

    @property
    def namespace_dir(self) -> Path:
        return self.roots[0] / "namespaces"

    @property
    def heat_bytes(self) -> int:
        return heat_bytes(self.max_segments, self.segment_bytes)

    def segment_dir(self, directory: int) -> Path:
        return self.roots[directory] / "segments"

    def directory_of(self, segment: int) -> int:
        return segment % len(self.roots)

    def segment_path(self, segment: int) -> Path:
        return self.segment_dir(self.directory_of(segment)) / f"{segment:08d}.seg"


def heat_row_bytes(segment_bytes: int) -> int:
    """Bytes of heat.bin for one segment: its hold time and its read marks."""
    return align_up(SEGMENT_HEAT_BYTES + -(-segment_bytes // GRANULE), 64)


def extent_map_bytes(segment_bytes: int) -> int:
    """Set aside for the blocks in which a file system notes where a fragmented segment lies; ext4 counts them as the file's.

    ext4 needs 4 KiB for each 340 extents beyond the first four.
    """
    return max(ALIGN, segment_bytes >> 10)


def _segment_cost(segment_bytes: int) -> int:
    """Bytes of the capacity that one segment takes."""
    return segment_bytes + heat_row_bytes(segment_bytes) + extent_map_bytes(segment_bytes)


def heat_bytes(segments: int, segment_bytes: int) -> int:
    """Size of heat.bin; not rounded, so that it tells how many segments the store may have."""
    return HEAT_FIXED_BYTES + segments * heat_row_bytes(segment_bytes)


def map_bytes_for(capacity: int) -> int:
    """The index may grow to this: enough for pages of 16 KiB, and part of the capacity."""
    return align_up(max(4 * MIB, capacity // 48), MIB)


def _fixed_bytes(map_bytes: int) -> int:
    return map_bytes + HEAT_FIXED_BYTES + SMALL_FILES_BYTES


def _max_segments(capacity: int, segment_bytes: int, map_bytes: int, roots: int) -> int:
    room = capacity - _fixed_bytes(map_bytes) - ALIGN
    return max(0, room // _segment_cost(segment_bytes)) // roots * roots


def choose_segment_bytes(capacity: int, roots: int) -> int:
    """About 64 segments a directory, a power of two from 16 MiB to 1 GiB."""
    size = 16 * MIB
    while size < GIB and size * 128 * roots <= capacity:
        size *= 2
    return size


def check_directory(path: str) -> Path:
    """Refuse what is not a safe directory of ours. Creates it 0700 when missing. Raises ConfigError."""
    root = Path(path)
    try:
        if not root.exists() and not root.is_symlink():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info, link = root.stat(), root.lstat()
    except OSError as err:
        raise ConfigError(
            f"cannot use directory: {err.strerror}", str(root), "give a directory that this user may create or write"
        ) from err
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError("path is not a directory", str(root), "write the directory that should hold the store")
    if info.st_uid != os.geteuid() or link.st_uid != os.geteuid():
        raise ConfigError(
            f"directory belongs to user {info.st_uid}, this process is user {os.geteuid()}",
            str(root),
            "use a directory of your own; cached bytes of another user are not trusted",
        )
    if info.st_mode & stat.S_IWOTH:
        raise ConfigError("directory is writable by everyone", str(root), f"chmod 700 {root}")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError("directory is read-only for this user", str(root), "make it writable or choose another path")
    names = {e.name for e in os.scandir(root) if not LEFTOVER.match(e.name)}
    strange = names - _OURS - {"lost+found"}
    if strange and not (root / "store.json").exists():
        raise ConfigError(
            f"directory holds something else ({', '.join(sorted(strange)[:3])})", str(root), "use an empty directory"
        )
    return root


def prepare(config: HiCacheExtConfig) -> tuple[Path, ...]:
    """Check every directory of the config before anything is written in one. Raises ConfigError."""
    if not config.path:
        raise ConfigError("the nvme store needs a path", "path", 'write a directory, for example "/mnt/nvme0/kv"')
    roots = tuple(check_directory(p) for p in config.path)
    if len({os.path.realpath(r) for r in roots}) != len(roots):
        raise ConfigError("path names one directory twice", ", ".join(config.path), "write each drive once")
    disks: dict[int, int] = {}
    for root in roots:
        fs = os.statvfs(root)
        disks[root.stat().st_dev] = fs.f_blocks * fs.f_frsize
    if config.capacity > sum(disks.values()):
        raise ConfigError(
            f"capacity {config.capacity} is larger than the file system ({sum(disks.values())} bytes)",
            ", ".join(config.path),
            "write a smaller capacity",
        )
    return roots


def load_or_create(config: HiCacheExtConfig, roots: tuple[Path, ...]) -> Layout:
    """Read store.json of every directory, or write it once. The caller holds the open lock. Raises ConfigError."""
    head = _read_head(roots[0])
    if head is None:
        head = _new_head(config, len(roots))
    segment_bytes, map_bytes = int(head["segment_bytes"]), int(head["map_bytes"])
    if config.segment and config.segment != segment_bytes:
        raise ConfigError(
            f"segment is {config.segment}, the store was made with {segment_bytes}", str(roots[0]), "leave segment out"
        )
    if head["directories"] != len(roots):
        raise ConfigError(
            f"the store has {head['directories']} directories, path names {len(roots)}",
            str(roots[0]),
            "name the directories it was made with, in the same order",
        )
    for number, root in enumerate(roots):
        _claim(root, {**head, "directory": number})
    segments = _max_segments(config.capacity, segment_bytes, map_bytes, len(roots))
    if segments < MIN_SEGMENTS * len(roots):
        least = MIN_SEGMENTS * len(roots) * _segment_cost(segment_bytes)
        least = align_up(least + _fixed_bytes(map_bytes) + 2 * ALIGN, MIB)
        raise ConfigError(
            f"capacity {config.capacity} is too small for segments of {segment_bytes} bytes",
            "capacity",
            f"write at least {least} bytes, or a smaller segment for a new store",
        )
    return Layout(roots, bytes.fromhex(head["store_id"]), segment_bytes, map_bytes, segments)


def _new_head(config: HiCacheExtConfig, roots: int) -> dict[str, Any]:
    segment = config.segment or choose_segment_bytes(config.capacity, roots)
    if segment % ALIGN or not 16 * ALIGN <= segment <= 64 * GIB:
        raise ConfigError(f"segment is {segment}", "config", "write a multiple of 4 KiB from 64 KiB to 64 GiB")
    return {
        "product": PRODUCT,
        "format": FORMAT_VERSION,
        "store_id": secrets.token_hex(16),
        "segment_bytes": segment,
        "map_bytes": map_bytes_for(config.capacity),
        "directories": roots,
    }


def _read_head(root: Path) -> dict[str, Any] | None:
    try:
        raw = (root / "store.json").read_bytes()
    except FileNotFoundError:
        return None
    except OSError as err:
        raise ConfigError(f"cannot read store.json: {err.strerror}", str(root), "check its owner and mode") from err
    try:
        head: dict[str, Any] | None = json.loads(raw) if len(raw) <= 65_536 else None
        version = head["format"] if isinstance(head, dict) and head.get("product") == PRODUCT else None
    except (ValueError, KeyError):
        version = None
    if not isinstance(version, int) or head is None:
        raise ConfigError("store.json is not one of ours", str(root), "use an empty directory, or delete this one")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"store format {version}, this version reads {FORMAT_VERSION}", str(root), "upgrade, or use a new directory"
        )
    numbers = ("segment_bytes", "map_bytes", "directories")
    good = all(isinstance(head.get(k), int) and 0 < head[k] < 1 << 50 for k in numbers)
    store_id = head.get("store_id")
    if not good or not isinstance(store_id, str) or len(store_id) != 32 or head["segment_bytes"] % ALIGN:
        raise ConfigError("store.json is damaged", str(root), "delete the directory; it is only a cache")
    return head


def _claim(root: Path, head: dict[str, Any]) -> None:
    there = _read_head(root)
    if there is None:
        write_atomically(root / "store.json", json.dumps(head, indent=1).encode())
    elif (there["store_id"], there.get("directory", 0)) != (head["store_id"], head["directory"]):
        raise ConfigError("directory belongs to another store", str(root), "keep the order of path, or use a new one")
    for name in ("segments",) if head["directory"] else ("segments", "index", "namespaces"):
        (root / name).mkdir(mode=0o700, exist_ok=True)


def write_atomically(path: Path, raw: bytes) -> None:
    """Write a 0600 file so that a reader sees all of it or nothing, also after power loss."""
    temporary = path.with_name(temporary_name(path.name))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            left = memoryview(raw)
            while left:  # a disk that is almost full takes a part
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def try_lock(fd: int, shared: bool = False) -> bool:
    """Take the lock of an open file without waiting; False when another process (or opening) has it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def opening(root: Path, timeout_s: float = OPEN_TIMEOUT_S) -> Iterator[None]:
    """Serialise open and close of a store between processes. Raises StoreError when it cannot get in."""
    fd = open_lock_file(root / "open.lock")
    try:
        deadline = time.monotonic() + timeout_s
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise StoreError("open", "another process is opening this store", path=str(root), is_transient=True)
            time.sleep(0.002)
        yield
    finally:
        os.close(fd)


def existing_capacity(root: Path) -> int:
    """The capacity that the processes on an existing store use, from store.json and the size of heat.bin.

    For tools that come along without a config. Raises ConfigError when there is no store of ours in ``root``.
    """
    head = _read_head(root)
    if head is None:
        raise ConfigError("no store here: store.json is missing", str(root), "name the first directory of a store")
    segment_bytes, map_bytes = int(head["segment_bytes"]), int(head["map_bytes"])
    row = heat_row_bytes(segment_bytes)
    try:
        segments = max(0, (root / "heat.bin").stat().st_size - HEAT_FIXED_BYTES) // row
    except FileNotFoundError:
        segments = MIN_SEGMENTS * int(head["directories"])
    return _fixed_bytes(map_bytes) + ALIGN + segments * _segment_cost(segment_bytes)
