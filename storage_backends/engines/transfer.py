"""One extent moved in full by blocking calls: short transfers go on, EINTR and EAGAIN are retried boundedly."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines.files import FILE_ALIGN
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


def transfer(
    call: VectoredCall, fd: int, iov: NDArray[np.uint64], offset: int, nbytes: int, direct: bool, is_write: bool
) -> int:
    """Move ``nbytes`` between the extent at ``offset`` and ``iov``. Bytes moved (less at end of file) or -errno."""
    done = stalls = 0
    best = 0
    while done < nbytes:
        moved = call(fd, rest_of(iov, done) if done else iov, offset + done)
        if moved in _AGAIN and stalls < MAX_STALLS:
            stalls += 1
            continue
        if moved < 0:
            return moved
        if moved == 0:
            return -errno.EIO if is_write else done
        done += moved
        stalls = 0 if done > best else stalls + 1
        best = max(best, done)
        if stalls >= MAX_STALLS:
            return -errno.EIO
        if done < nbytes:
            resumed = resume_at(fd, direct, offset, done)
            if resumed < 0:
                return -errno.EIO if is_write else done
            done = resumed
    return done
