"""heat.bin: what all processes on a store tell each other without a transaction: holds, read marks, evicted keys.

Losing any of it costs nothing but a better choice, so plain stores into a shared mapping are enough.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.page import ALIGN
from sglang_hicache_ext.storage_backends.nvme.layout import (
    GRANULE,
    HEAT_FIXED_BYTES,
    SEGMENT_HEAT_BYTES,
    Layout,
    heat_row_bytes,
)
from sglang_hicache_ext.storage_backends.nvme.prealloc import preallocate

_MAGIC = b"HXheat\x00\x01"
HISTORY = (HEAT_FIXED_BYTES - ALIGN) // 8
_MIX = 0x9E3779B97F4A7C15


class Heat:
    """The mapping. Thread-safe: single-word stores; a lost race loses a mark, never more.

    Attributes:
        hold_until: [segments] float64, monotonic seconds until which a segment is not reclaimed.
        marks: [segments, granules] uint8, 1 where a page that starts there was read.
        leaves_marks: False for tools, whose reads say nothing about what servers will need.
    """

    def __init__(self, layout: Layout, *, fresh: bool) -> None:
        """Map the file; ``fresh`` (no other process is live) makes it anew when it is missing or of another size."""
        self.leaves_marks = True
        size = layout.heat_bytes
        fd = os.open(layout.heat_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            there = os.fstat(fd).st_size
            if there != size and not fresh:
                raise ConfigError(
                    "another process has this store open with another capacity", "capacity", "use the same everywhere"
                )
            if there != size or os.pread(fd, 8, 0) != _MAGIC:
                os.ftruncate(fd, 0)
                preallocate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._history = np.frombuffer(self._map, np.uint64, HISTORY, ALIGN)
        row = heat_row_bytes(layout.segment_bytes)
        rows = np.frombuffer(self._map, np.uint8, layout.max_segments * row, HEAT_FIXED_BYTES)
        rows = rows.reshape(layout.max_segments, row)
        self.hold_until = np.ndarray((layout.max_segments,), np.float64, self._map, HEAT_FIXED_BYTES, (row,))
        self.marks: NDArray[np.uint8] = rows[:, SEGMENT_HEAT_BYTES:]
        if fresh:  # monotonic time starts again with every boot
            self._map[:8] = _MAGIC
            self.hold_until[:] = 0.0

    def mark_read(self, segments: NDArray[np.uint32], blocks: NDArray[np.uint32]) -> None:
        if self.leaves_marks:
            self.marks[segments, blocks // (GRANULE // ALIGN)] = 1

    def was_read(self, segment: int, blocks: NDArray[np.uint32]) -> NDArray[np.bool_]:
        marked: NDArray[np.bool_] = self.marks[segment, blocks // (GRANULE // ALIGN)] != 0
        return marked

    def hold(self, segments: NDArray[np.uint32], until: float) -> None:
        for segment in np.unique(segments):
            self.hold_until[segment] = max(self.hold_until[segment], until)

    def reset_segment(self, segment: int) -> None:
        self.marks[segment] = 0
        self.hold_until[segment] = 0.0

    def remember_evicted(self, namespace: int, keys: Sequence[bytes]) -> None:
        prints = _prints(namespace, keys)
        self._history[prints % np.uint64(HISTORY)] = prints

    def forget_evicted(self, namespace: int, keys: Sequence[bytes]) -> None:
        prints = _prints(namespace, keys)
        slots = (prints % np.uint64(HISTORY))[self.was_evicted(namespace, keys)]
        self._history[slots] = 0

    def was_evicted(self, namespace: int, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Whether each key is in the bounded history (one slot a key, the later one wins)."""
        prints = _prints(namespace, keys)
        found: NDArray[np.bool_] = self._history[prints % np.uint64(HISTORY)] == prints
        return found

    def forget_all_evicted(self) -> None:
        self._history[:] = 0

    def close(self) -> None:
        """Unmap; a view still in use elsewhere keeps the memory until it goes."""
        del self._history, self.hold_until, self.marks
        with contextlib.suppress(BufferError):
            self._map.close()


def _prints(namespace: int, keys: Sequence[bytes]) -> NDArray[np.uint64]:
    heads = np.frombuffer(b"".join(k[:8] for k in keys), np.uint64)
    return heads ^ np.uint64((namespace + 1) * _MIX % (1 << 64))
