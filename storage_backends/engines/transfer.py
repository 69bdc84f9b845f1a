"""One extent moved in full by blocking calls: short transfers go on, EINTR and EAGAIN are retried boundedly."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines.files import FILE_ALIGN, OpenFile
from sglang_hicache_ext.storage_backends.engines.plans import rest_of

VectoredCall = Callable[[int, NDArray[np.uint64], int], int]
"""(descriptor, [pieces, 2] rows of address and bytes, file offset) -> bytes moved or -errno."""

MAX_STALLS = 64
"""Calls in a row without progress (EINTR, EAGAIN, a tail that does not move) before an operation fails."""

_AGAIN = (-errno.EINTR, -errno.EAGAIN)


def at_end_of_file(fd: int, position: int) -> bool:
    """True when no byte stands at ``position``; files that cannot be asked count as ended."""
    try:
        return os.fstat(fd).st_size <= position
    except OSError:
        return True


def resume_at(fd: int, direct: bool, offset: int, done: int) -> int:
    """Bytes of an operation that count as moved after a short transfer, or -1 when the file ends there.

    Direct I/O can only go on at an aligned offset, so the unaligned tail is moved again.
    """
    if not direct or (offset + done) % FILE_ALIGN == 0:
        return done
    if at_end_of_file(fd, offset + done):
        return -1
    return max(0, (offset + done) // FILE_ALIGN * FILE_ALIGN - offset)


class Progress:
    """What one operation has moved so far, and whether it is over.

    Attributes:
        done: bytes from the start of the operation that count as moved; the next call starts there.
        result: bytes moved or -errno, valid once ``step`` said that the operation is over.
    """

    __slots__ = ("_best", "_file", "_is_write", "_nbytes", "_offset", "_stalls", "done", "result")

    def __init__(self, file: OpenFile, offset: int, nbytes: int, is_write: bool) -> None:
        self._file, self._offset, self._nbytes, self._is_write = file, offset, nbytes, is_write
        self.done = self.result = self._best = self._stalls = 0

    def step(self, moved: int) -> bool:
        """Take the result of one call at ``done``; True when the operation is over."""
        if moved in _AGAIN:
            return self._stall(moved)
        if moved < 0:
            return self._end(moved)
        self.done += moved
        if self.done >= self._nbytes:
            return self._end(self.done)
        resumed = -1 if moved == 0 else resume_at(self._file.fd, self._file.direct, self._offset, self.done)
        if resumed < 0:
            return self._end(-errno.EIO if self._is_write else self.done)
        self.done = resumed
        if self.done <= self._best:
            return self._stall(-errno.EIO)
        self._best, self._stalls = self.done, 0
        return False

    def _stall(self, error: int) -> bool:
        self._stalls += 1
        return self._stalls > MAX_STALLS and self._end(error)

    def _end(self, result: int) -> bool:
        self.result = result
        return True


def transfer(
    call: VectoredCall, file: OpenFile, iov: NDArray[np.uint64], offset: int, nbytes: int, is_write: bool
) -> int:
    """Move ``nbytes`` between the extent at ``offset`` and ``iov``. Bytes moved (less at end of file) or -errno."""
    progress = Progress(file, offset, nbytes, is_write)
    while nbytes and not progress.step(
        call(file.fd, rest_of(iov, progress.done) if progress.done else iov, offset + progress.done)
    ):
        pass
    return progress.result
