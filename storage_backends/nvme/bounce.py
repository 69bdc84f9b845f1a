"""A bounded pool of aligned memory for host regions that direct I/O cannot reach."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Sequence

import numpy as np

from sglang_hicache_ext.page import Regions, align_up
from sglang_hicache_ext.ports import Drain

SLOT_BYTES = 8 << 20
POOL_BYTES = 64 << 20


class Slot:
    """Aligned memory of one wave of pages, ``stride`` bytes apart."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.addr = int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def rows(self, pages: int, stride: int) -> Regions:
        """Regions of one piece a page, the filling included."""
        addrs = np.uint64(self.addr) + np.arange(pages, dtype=np.uint64) * np.uint64(stride)
        return Regions(addrs[:, None], np.asarray([stride], np.int64), self)


class BouncePool:
    """Thread-safe. A slot whose I/O outlived its call comes back when its drain is done."""

    def __init__(self, pool_bytes: int = POOL_BYTES) -> None:
        self._limit = pool_bytes
        self._used = 0
        self._idle: list[Slot] = []
        self._draining: list[tuple[Drain, Slot]] = []
        self._changed = threading.Condition()

    def pages_per_slot(self, stride: int) -> int:
        return max(1, SLOT_BYTES // stride)

    def take(self, stride: int, deadline: float) -> Slot | None:
        """A slot for ``pages_per_slot(stride)`` pages; None when there is none before ``deadline`` (monotonic)."""
        nbytes = max(SLOT_BYTES, align_up(stride))
        with self._changed:
            while True:
                self._collect()
                for slot in self._idle:
                    if slot.nbytes >= nbytes:
                        self._idle.remove(slot)
                        return slot
                if self._used and self._used + nbytes > self._limit and self._idle:
                    self._used -= self._idle.pop().nbytes
                    continue
                if not self._used or self._used + nbytes <= self._limit:
                    slot = Slot(nbytes)
                    self._used += nbytes
                    return slot
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, 0.05))

    def give(self, slot: Slot, drain: Drain | None = None) -> None:
        """Hand a slot back, at once or when ``drain`` is done."""
        with self._changed:
            if drain is None:
                self._idle.append(slot)
            else:
                self._draining.append((drain, slot))
            self._changed.notify()

    def _collect(self) -> None:
        still = []
        for drain, slot in self._draining:
            if drain.is_done():
                self._idle.append(slot)
            else:
                still.append((drain, slot))
        self._draining = still

    def close(self) -> None:
        with self._changed:
            self._idle.clear()


def gather(source: Regions, pages: Sequence[int], target: int, stride: int) -> None:
    """Copy pages of ``source`` to ``target``, ``stride`` bytes apart; the filling stays as it is."""
    sizes = source.sizes.tolist()
    for slot, row in enumerate(source.addrs[np.asarray(pages, np.int64)].tolist()):
        at = target + slot * stride
        for addr, size in zip(row, sizes, strict=True):
            ctypes.memmove(at, addr, size)
            at += size


def scatter(source: int, target: Regions, page: int) -> None:
    """Copy one contiguous page at address ``source`` into row ``page`` of ``target``."""
    for addr, size in zip(target.addrs[page].tolist(), target.sizes.tolist(), strict=True):
        ctypes.memmove(addr, source, size)
        source += size
