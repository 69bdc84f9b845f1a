"""The few libc calls that Python does not offer with raw addresses. Every call releases the interpreter lock."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)

IOV_MAX = 1024
"""Most pieces of one vectored call. Source: Linux UIO_MAXIOV."""

_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_DIO_MEM_WORD, _DIO_OFFSET_WORD = 38, 39  # u32 index of stx_dio_mem_align and stx_dio_offset_align, linux/stat.h

_preadv = _libc.preadv64
_pwritev = _libc.pwritev64
for _call in (_preadv, _pwritev):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _call.restype = ctypes.c_ssize_t


def _vectored(function: Any, fd: int, iov: NDArray[np.uint64], offset: int) -> int:
    moved = int(function(fd, iov.ctypes.data, min(len(iov), IOV_MAX), offset))
    return moved if moved >= 0 else -ctypes.get_errno()


def preadv(fd: int, iov: NDArray[np.uint64], offset: int) -> int:
    """Read into the first IOV_MAX rows of ``iov``, [pieces, 2] (address, bytes). Bytes moved or -errno."""
    return _vectored(_preadv, fd, iov, offset)


def pwritev(fd: int, iov: NDArray[np.uint64], offset: int) -> int:
    """Write the first IOV_MAX rows of ``iov``, [pieces, 2] (address, bytes). Bytes moved or -errno."""
    return _vectored(_pwritev, fd, iov, offset)


_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long,) * 7
_syscall.restype = ctypes.c_long
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

Syscall = Callable[[int, int, int, int, int, int, int], int]
"""(number, six arguments) -> result or -errno."""


def syscall(number: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """Call the kernel. Result or -errno."""
    result = int(_syscall(number, a, b, c, d, e, f))
    return result if result >= 0 else -ctypes.get_errno()


def map_shared(fd: int, nbytes: int, offset: int) -> int:
    """mmap read-write, shared, populated; unlike Python's mmap it holds no descriptor. Address. Raises OSError."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0x8000)
    addr = _mmap(None, nbytes, protection, flags, fd, offset)
    if addr is None or addr == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(addr)


def unmap(addr: int, nbytes: int) -> None:
    _munmap(addr, nbytes)


def dio_alignment(path: str) -> tuple[int, int] | None:
    """(memory, file offset) alignment in bytes that direct I/O on ``path`` needs.

    Returns:
        (0, 0) when the file system has no direct I/O for this file, None when the kernel does not say.
        Source: statx(2), STATX_DIOALIGN, Linux 6.1.
    """
    statx = getattr(_libc, "statx", None)
    if statx is None:
        return None
    words = np.zeros(_STATX_BYTES // 4, np.uint32)
    rc = statx(_AT_FDCWD, path.encode(), 0, _STATX_DIOALIGN, ctypes.c_void_p(words.ctypes.data))
    if rc != 0 or not int(words[0]) & _STATX_DIOALIGN:
        return None
    return int(words[_DIO_MEM_WORD]), int(words[_DIO_OFFSET_WORD])
