"""Reclaim: the oldest sealed segment nobody holds is emptied; pages that were read since are kept by moving them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.page import align_up
from sglang_hicache_ext.ports import Clock
from sglang_hicache_ext.storage_backends.nvme.heat import Heat
from sglang_hicache_ext.storage_backends.nvme.index import PAGE, Index, split_key
from sglang_hicache_ext.storage_backends.nvme.layout import Layout
from sglang_hicache_ext.storage_backends.nvme.segments import Segment, SegmentFiles, State
from sglang_hicache_ext.storage_backends.nvme.tables import walk
from sglang_hicache_ext.storage_backends.record import Table

Move = Callable[[int, bytes, int, list[bytes], NDArray[np.void]], NDArray[np.void]]
"""(directory, namespace id, its number, keys, old PAGE) -> new PAGE per key, ``nbytes`` 0 where it could not move."""


class Reclaim:
    """Frees segments. Called under the directory's lock; other processes are kept off by the segment file's lock."""

    def __init__(
        self, layout: Layout, files: SegmentFiles, index: Index, heat: Heat, clock: Clock, metrics: Metrics,
        point: Callable[[str], None], move: Move | None,
    ) -> None:  # fmt: skip
        """``move`` None: nothing is kept."""
        self._layout, self._files, self._index, self._heat = layout, files, index, heat
        self._clock, self._metrics, self._point, self._move = clock, metrics, point, move

    def free_one(self, directory: int, may_reinsert: bool) -> bool:
        """Free one segment of ``directory``; False when every one is open, held or locked, or the index refuses."""
        try:
            if self._free_oldest(directory, may_reinsert):
                return True
            return bool(self._files.seal_dead()) and self._free_oldest(directory, may_reinsert)
        except lmdb.Error:
            self._metrics.add("index_write_errors")
            return False

    def _free_oldest(self, directory: int, may_reinsert: bool) -> bool:
        now = self._clock.now()
        rows = [s for s in self._files.table.snapshot() if self._layout.directory_of(s.number) == directory]
        for row in sorted((s for s in rows if s.state is State.SEALED), key=lambda s: s.sequence):
            if self._heat.hold_until[row.number] >= now:
                self._metrics.add("reclaim_held_segments")
                continue
            fd = self._files.lock(row.number)
            if fd is None:
                continue
            try:
                with self._index.read() as txn:
                    current = self._files.table.get(txn, row.number)
                if current is None or current.state is not State.SEALED or current.generation != row.generation:
                    continue
                self._empty(current, fd, directory, may_reinsert)
                return True
            finally:
                os.close(fd)
        return False

    def _empty(self, segment: Segment, fd: int, directory: int, may_reinsert: bool) -> None:
        numbers = self._index.namespace_numbers()
        budget = self._layout.segment_bytes // 2 if may_reinsert and self._move is not None else 0
        try:
            for table in walk(fd, segment.identity(self._layout.store_id), self._layout.segment_bytes):
                number = numbers.get(table.namespace)
                if number is not None and len(table.entries):
                    budget -= self._empty_table(segment, table, number, directory, budget)
        except OSError:  # a bad sector under a table: the rest is found by the scan
            self._metrics.add("reclaim_read_errors")
        self._forget_rest(segment)
        self._heat.reset_segment(segment.number)
        self._point("reclaim_emptied")
        with self._index.write() as txn:
            row = self._files.table.get(txn, segment.number)
            if row is not None and row.generation == segment.generation:
                self._files.table.put(txn, replace(row, state=State.FREE, live=0))
        self._metrics.add("reclaimed_segments")
        self._point("reclaim_freed")

    def _empty_table(self, segment: Segment, table: Table, number: int, directory: int, budget: int) -> int:
        """Move or forget the pages of one batch; returns the bytes moved."""
        raw = table.entries["key"].tobytes()
        keys = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        _, entries = self._index.lookup(number, keys)
        here = (entries["segment"] == segment.number) & (entries["generation"] == segment.generation)
        live = np.flatnonzero(here & (entries["block"] == table.entries["block"]) & (entries["nbytes"] != 0))
        moved = np.zeros(0, np.int64)
        if budget > 0 and len(live):
            warm = live[self._heat.was_read(segment.number, entries["block"][live])]
            strides = np.cumsum([align_up(int(b)) for b in entries["nbytes"][warm]])
            moved = self._keep(number, table.namespace, keys, entries, warm[strides <= budget], directory)
        gone = np.setdiff1d(live, moved)
        self._forget(number, [keys[i] for i in gone.tolist()], entries[gone])
        return int(sum(align_up(int(b)) for b in entries["nbytes"][moved]))

    def _keep(
        self, number: int, ns_id: bytes, keys: list[bytes], entries: NDArray[np.void], rows: NDArray[np.int64],
        directory: int,
    ) -> NDArray[np.int64]:  # fmt: skip
        if not len(rows) or self._move is None:
            return np.zeros(0, np.int64)
        kept: list[NDArray[np.int64]] = []
        for nbytes in np.unique(entries["nbytes"][rows]).tolist():
            same = rows[entries["nbytes"][rows] == nbytes]
            names = [keys[i] for i in same.tolist()]
            places = self._move(directory, ns_id, number, names, entries[same])
            kept.append(same[self._point_to(number, names, entries[same], places)])
        self._point("reclaim_moved")
        return np.concatenate(kept)

    def _point_to(
        self, number: int, keys: list[bytes], old: NDArray[np.void], new: NDArray[np.void]
    ) -> NDArray[np.bool_]:
        """Let the index point to the pages' new places, where nobody changed it meanwhile."""
        done = np.zeros(len(keys), np.bool_)
        there = np.flatnonzero(new["nbytes"] != 0)
        if len(there):
            with self._index.write() as txn:
                picked = [keys[i] for i in there.tolist()]
                done[there] = self._index.swap(txn, number, picked, old[there], new[there])
                self._count(txn, old[done], -1)
                self._count(txn, new[done], 1)
        self._metrics.add("reinserted_pages", int(done.sum()))
        return done

    def _count(self, txn: Any, entries: NDArray[np.void], sign: int) -> None:
        for segment, count in zip(*np.unique(entries["segment"], return_counts=True), strict=True):
            self._files.table.add_live(txn, int(segment), sign * int(count))

    def _forget(self, number: int, keys: list[bytes], entries: NDArray[np.void]) -> None:
        size = self._index.slice_keys
        for start in range(0, len(keys), size):
            part, old = keys[start : start + size], entries[start : start + size]
            self._heat.remember_evicted(number, part)  # first: a reader that finds it gone also finds out why
            with self._index.write() as txn:
                gone = self._index.swap(txn, number, part, old, None)
                self._count(txn, old[gone], -1)
            self._metrics.add("reclaimed_pages", int(gone.sum()))
            self._point("reclaim_forgot")

    def _forget_rest(self, segment: Segment) -> None:
        """Entries whose table cannot be read any more are found by a scan; normally there is none."""
        with self._index.read() as txn:
            row = self._files.table.get(txn, segment.number)
        if row is None or not row.live:
            return
        self._metrics.add("reclaim_scans")
        after = b""
        while batch := self._index.scan(None, after):
            after = batch[-1][0]
            entries = np.frombuffer(b"".join(v for _, v in batch), PAGE)
            for i in np.flatnonzero(entries["segment"] == segment.number).tolist():
                number, key = split_key(batch[i][0])
                self._forget(number, [key], entries[i : i + 1])
