"""The staging ring: shared memory in which the worker's client reads and writes, cut into lanes of two halves.

A ring belongs to one life of the worker. It is never handed to the next one, so nothing that an old life may still
write can reach memory in use; the pages go back to the system when the last reference is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from sglang_hicache_ext.page import ALIGN, align_up

_MADV_POPULATE_WRITE = 23
"""Not named by the mmap module. Source: linux/mman-common.h."""


class Ring:
    """Shared memory of ``nbytes``, two halves per lane so that one is verified while the other is filled.

    Attributes:
        fd: the memory file; the worker maps it too.
        base: address of the mapping in this process.
    """

    def __init__(self, nbytes: int, lanes: int) -> None:
        self.half_bytes = nbytes // (2 * lanes) // ALIGN * ALIGN
        self.nbytes = self.half_bytes * 2 * lanes
        self.fd = os.memfd_create("hicache-ext-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._map = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED)
            with contextlib.suppress(OSError):  # huge pages where shmem_enabled is "advise"; before the first touch
                self._map.madvise(mmap.MADV_HUGEPAGE)
            with contextlib.suppress(OSError):  # Linux 5.14; before that the first batches pay for the faults
                self._map.madvise(_MADV_POPULATE_WRITE)
        except BaseException:
            os.close(self.fd)
            raise
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.base = ctypes.addressof(self._anchor)

    def halves(self, lane: int) -> tuple[int, int]:
        """Offsets of the two halves of ``lane``."""
        first = 2 * lane * self.half_bytes
        return first, first + self.half_bytes

    def slots(self, object_bytes: int) -> int:
        """Objects of ``object_bytes`` that one half holds."""
        return self.half_bytes // slot_bytes(object_bytes)

    def close_fd(self) -> None:
        """Close the file descriptor; the mapping lives on as long as it is referenced."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def slot_bytes(object_bytes: int) -> int:
    """Bytes between two objects in a half; a cache line, so that payloads stay aligned for the copy."""
    return align_up(object_bytes, 64)
