"""Registered host memory of the io_uring engine: pinned once, shared by the rings of all threads.

One ring that does no I/O holds the table; the ring of a thread clones it at its next use (Linux 6.12), or registers the
pieces itself on older kernels. So memory can be registered while other threads are in the middle of their batches.
"""

from __future__ import annotations

import os
import resource
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines import libc
from sglang_hicache_ext.storage_backends.engines.ring import Ring

PIECE_BYTES = 1 << 30
"""Most bytes of one registered buffer. Source: io_uring_register(2), IORING_REGISTER_BUFFERS."""

SLOTS = 1024
"""Buffers of the table: 1 TiB of host memory in full pieces."""

_REGISTER_BUFFERS, _UNREGISTER_BUFFERS, _REGISTER_BUFFERS2, _BUFFERS_UPDATE, _CLONE_BUFFERS = 0, 1, 15, 16, 30
_SPARSE = 1


class RegisteredMemory:
    """The table of registered pieces. Thread-safe; ``generation`` grows with each change.

    Attributes:
        starts, ends: [pieces] uint64, sorted by address; replaced as a whole, never changed in place.
        slots: [pieces] int64 buffer index of each piece.
    """

    def __init__(self, call: libc.Syscall = libc.syscall) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._holder: Ring | None = None
        self._regions: dict[int, list[tuple[int, int, int]]] = {}
        self.generation = 0
        self.reason = "no memory was registered"
        self._publish()

    def register(self, addr: int, nbytes: int) -> bool:
        """Pin [addr, addr + nbytes). False when the limits or the kernel do not allow it; ``reason`` says why."""
        if nbytes <= 0:
            return False
        with self._lock:
            if addr in self._regions:
                return sum(piece[1] for piece in self._regions[addr]) >= nbytes
            pieces = self._pieces(addr, nbytes)
            error = self._pin(pieces) if pieces else -28
            if error < 0:
                self.reason = _why_not(-error, nbytes)
                return False
            self._regions[addr] = pieces
            self.reason = ""
            self._publish()
            return True

    def unregister(self, addr: int) -> None:
        with self._lock:
            pieces = self._regions.pop(addr, [])
            for _, _, slot in pieces:
                self._update(slot, 0, 0)
            if pieces:
                self._publish()

    def _pieces(self, addr: int, nbytes: int) -> list[tuple[int, int, int]]:
        """(address, bytes, slot) of each piece; empty when the table is full."""
        taken = {slot for pieces in self._regions.values() for _, _, slot in pieces}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        count = -(-nbytes // PIECE_BYTES)
        if count > len(free):
            return []
        return [(addr + i * PIECE_BYTES, min(PIECE_BYTES, nbytes - i * PIECE_BYTES), free[i]) for i in range(count)]

    def _pin(self, pieces: list[tuple[int, int, int]]) -> int:
        error = self._hold()
        for i, (addr, nbytes, slot) in enumerate(pieces if error >= 0 else ()):
            error = self._update(slot, addr, nbytes)
            if error < 0:
                for _, _, done in pieces[:i]:
                    self._update(done, 0, 0)
                break
        return error

    def _hold(self) -> int:
        """Make the ring that holds the table. 0 or -errno."""
        if self._holder is not None:
            return 0
        try:
            ring = Ring(1, self._call, (0,))
        except OSError as error:
            return -(error.errno or 1)
        table = np.array([SLOTS | _SPARSE << 32, 0, 0, 0], np.uint64)
        result = ring.register(_REGISTER_BUFFERS2, table.ctypes.data, table.nbytes)
        if result < 0:
            ring.close()
            return result
        self._holder = ring
        return 0

    def _update(self, slot: int, addr: int, nbytes: int) -> int:
        assert self._holder is not None
        iov = np.array([addr, nbytes], np.uint64)
        update = np.array([slot, iov.ctypes.data, 0, 1], np.uint64)
        return self._holder.register(_BUFFERS_UPDATE, update.ctypes.data, update.nbytes)

    def _publish(self) -> None:
        pieces = sorted(piece for region in self._regions.values() for piece in region)
        table = np.array(pieces, np.int64).reshape(-1, 3)
        self.table = Table(
            self.generation + 1, table[:, 0].astype(np.uint64), table[:, :2].sum(1).astype(np.uint64), table[:, 2]
        )
        self.generation = self.table.generation

    def share(self, ring: Ring, table: Table, had_one: bool) -> bool:
        """Give ``ring`` (called on its thread, nothing in flight) the buffers of ``table``."""
        with self._lock:
            if self._holder is None or table.generation != self.generation:
                return False
            if had_one:
                ring.register(_UNREGISTER_BUFFERS, 0, 0)
            if not len(table.starts):
                return False
            clone = np.zeros(8, np.uint32)
            clone[0] = self._holder.fd
            result = ring.register(_CLONE_BUFFERS, clone.ctypes.data, 1)
            if result < 0:
                result = self._register_again(ring, table)
            if result < 0:
                self.reason = _why_not(-result, int((table.ends - table.starts).sum()))
            return result >= 0

    def _register_again(self, ring: Ring, table: Table) -> int:
        """Kernels before 6.12: pin the pieces for this ring too, at the same indexes."""
        iov = np.zeros((int(table.slots.max()) + 1, 2), np.uint64)
        iov[table.slots, 0] = table.starts
        iov[table.slots, 1] = table.ends - table.starts
        return ring.register(_REGISTER_BUFFERS, iov.ctypes.data, len(iov))

    def describe(self) -> dict[str, Any]:
        with self._lock:
            nbytes = sum(piece[1] for pieces in self._regions.values() for piece in pieces)
            return {
                "registered_memory": nbytes > 0,
                "registered_bytes": nbytes,
                "registered_memory_reason": self.reason,
            }

    def close(self) -> None:
        with self._lock:
            self._regions.clear()
            self._publish()
            if self._holder is not None:
                self._holder.close()
                self._holder = None


class Table:
    """A snapshot of the registered pieces, sorted by address."""

    __slots__ = ("ends", "generation", "slots", "starts")

    def __init__(
        self, generation: int, starts: NDArray[np.uint64], ends: NDArray[np.uint64], slots: NDArray[np.int64]
    ) -> None:
        self.generation, self.starts, self.ends, self.slots = generation, starts, ends, slots

    def lookup(self, iov: NDArray[np.uint64]) -> NDArray[np.int64]:
        """[rows] buffer index of each memory piece, -1 where it does not lie in one registered buffer."""
        if not len(self.starts):
            return np.full(len(iov), -1, np.int64)
        if len(self.starts) == 1 and len(iov):  # the host pool alone: no search
            ends = iov[:, 0] + iov[:, 1]
            if iov[:, 0].min() >= self.starts[0] and ends.max() <= self.ends[0]:
                return np.full(len(iov), self.slots[0])
        piece = np.searchsorted(self.starts, iov[:, 0], side="right") - 1
        inside = (piece >= 0) & (iov[:, 0] + iov[:, 1] <= self.ends[piece])
        return np.where(inside, self.slots[piece], -1)


def _why_not(error: int, nbytes: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    hint = f"; RLIMIT_MEMLOCK is {shown}, raise it with ulimit -l" if error in (12, 1) else ""
    return f"registering {nbytes} bytes: {os.strerror(error)}{hint}"
