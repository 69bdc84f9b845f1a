"""Open files of an engine: handles that are never reused, direct I/O with fallback, close after the last operation."""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_hicache_ext.storage_backends.engines.libc import dio_alignment

FILE_ALIGN = 4096
"""Least alignment of file offsets and lengths: drives with 4 KiB sectors refuse 512 bytes."""

LEFTOVER = re.compile(r"^\..+\.\d+\.[0-9a-f]{8}$")
"""Names that ``temporary_name`` makes. Whoever opens a store as its only process removes what has such a name."""

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def temporary_name(stem: str) -> str:
    """A new name for a file that does not outlive its use; a killed process leaves it behind."""
    return f".{stem}.{os.getpid()}.{secrets.token_hex(4)}"


@dataclass(slots=True)
class OpenFile:
    """One open file. ``users`` counts the batches that hold it; the descriptor closes when the last one ends.

    Attributes:
        direct: True when O_DIRECT is in effect.
        reason: why not, when it is not.
        writable: opened for writing too.
        slot: index in a registered file table, -1 without one; kept by the engine.
    """

    handle: int
    fd: int
    path: str
    direct: bool
    reason: str = ""
    writable: bool = True
    users: int = 0
    closing: bool = False
    slot: int = -1


def open_direct(path: str, writable: bool, direct: bool) -> tuple[int, bool, str]:
    """Open an existing file: (descriptor, direct in effect, why not). Raises OSError."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
    if not direct:
        return os.open(path, flags), False, "buffered I/O was asked for"
    if dio_alignment(path) == (0, 0):
        return os.open(path, flags), False, "the file system has no direct I/O for this file"
    try:
        return os.open(path, flags | os.O_DIRECT), True, ""
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, flags), False, f"O_DIRECT refused: {os.strerror(error.errno)}"


class FileTable:
    """Thread-safe handle table. A descriptor never closes under a running operation.

    That matters for correctness: a closed descriptor number is given out again, and a late write would land in
    somebody else's file.
    """

    def __init__(self, direct: bool = True, on_shut: Callable[[OpenFile], None] | None = None) -> None:
        self._direct = direct
        self._on_shut = on_shut
        self._lock = threading.Lock()
        self._files: dict[int, OpenFile] = {}
        self._next = 0
        self._buffered_reason = ""
        self._opened_direct = False

    def open(self, path: str, writable: bool = True) -> OpenFile:
        fd, direct, reason = open_direct(path, writable, self._direct)
        with self._lock:
            file = OpenFile(self._next, fd, path, direct, reason, writable)
            self._next += 1
            self._files[file.handle] = file
            self._buffered_reason = reason or self._buffered_reason
            self._opened_direct = direct or self._opened_direct
        return file

    def slot(self, handle: int) -> int:
        """Registered slot of an open file, -1 without one."""
        with self._lock:
            file = self._files.get(handle)
        return file.slot if file is not None else -1

    def close(self, handle: int) -> None:
        """Forget ``handle``; its descriptor closes when no batch uses it. Unknown handles are ignored."""
        with self._lock:
            file = self._files.pop(handle, None)
            if file is not None:
                file.closing = True
        if file is not None and file.users == 0:
            self._shut(file)

    def close_all(self) -> None:
        with self._lock:
            handles = list(self._files)
        for handle in handles:
            self.close(handle)

    def acquire(self, handles: Iterable[int]) -> dict[int, OpenFile]:
        """Hold the files of a batch open. Closed or unknown handles are left out of the answer."""
        with self._lock:
            held = {h: self._files[h] for h in handles if h in self._files}
            for file in held.values():
                file.users += 1
        return held

    def release(self, files: Iterable[OpenFile]) -> None:
        with self._lock:
            last = []
            for file in files:
                file.users -= 1
                if file.closing and file.users == 0:
                    last.append(file)
        for file in last:
            self._shut(file)

    def _shut(self, file: OpenFile) -> None:
        with self._lock:
            fd, file.fd = file.fd, -1
        if fd >= 0:
            if self._on_shut is not None:
                self._on_shut(file)
            os.close(fd)

    def describe(self) -> dict[str, object]:
        """Requested and effective direct I/O over the files opened so far."""
        with self._lock:
            effective = None if self._next == 0 else self._opened_direct and not self._buffered_reason
            return {
                "direct_requested": self._direct,
                "direct": effective,
                "direct_reason": self._buffered_reason,
                "open_files": len(self._files),
            }
