"""Forgetting pages on request. Segments are left to reclaim, or are free at once when nothing in them is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.nvme.heat import Heat
from sglang_hicache_ext.storage_backends.nvme.index import PAGE, Index, split_key
from sglang_hicache_ext.storage_backends.nvme.layout import Layout
from sglang_hicache_ext.storage_backends.nvme.segments import SegmentFiles


class Removal:
    """Thread-safe. A reader that is under way keeps its bytes or fails its checksum; both are right."""

    def __init__(self, layout: Layout, index: Index, files: SegmentFiles, heat: Heat) -> None:
        self._layout, self._index, self._files, self._heat = layout, index, files, heat

    def remove(self, number: int, keys: Sequence[bytes]) -> int:
        """Forget ``keys``; returns how many were there."""
        removed = 0
        unique = list(dict.fromkeys(keys))
        size = self._index.slice_keys
        for start in range(0, len(unique), size):
            part = unique[start : start + size]
            found, entries = self._index.lookup(number, part)
            rows = np.flatnonzero(found)
            there = [part[r] for r in rows.tolist()]
            with self._index.write() as txn:
                gone = self._index.swap(txn, number, there, entries[rows], None)
                self._uncount(txn, entries[rows[gone]])
            removed += int(gone.sum())
            self._heat.forget_evicted(number, part)
        return removed

    def clear(self, number: int | None) -> int:
        """Forget every page of a namespace, or all."""
        removed = 0
        while batch := self._index.scan(number, limit=self._index.slice_keys):
            with self._index.write() as txn:
                gone = self._index.delete_unchanged(txn, batch)
                self._uncount(txn, np.frombuffer(b"".join(gone), PAGE))
            removed += len(gone)
            self._forget_history(batch)
        if number is None:
            self._heat.forget_all_evicted()
        return removed

    def _forget_history(self, batch: list[tuple[bytes, bytes]]) -> None:
        by_number: dict[int, list[bytes]] = {}
        for full, _ in batch:
            number, key = split_key(full)
            by_number.setdefault(number, []).append(key)
        for number, keys in by_number.items():
            self._heat.forget_evicted(number, keys)

    def _uncount(self, txn: Any, entries: NDArray[np.void]) -> None:
        for segment, count in zip(*np.unique(entries["segment"], return_counts=True), strict=True):
            self._files.table.add_live(txn, int(segment), -int(count))
