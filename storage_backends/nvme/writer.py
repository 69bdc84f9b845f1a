"""The write path: payloads first, hashed while the device works, then the table, then one transaction publishes."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import lmdb
import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.page import ALIGN, align_up
from sglang_hicache_ext.ports import Drain
from sglang_hicache_ext.storage_backends.engines.base import PENDING, TIMED_OUT
from sglang_hicache_ext.storage_backends.nvme.bounce import BouncePool, Slot, gather
from sglang_hicache_ext.storage_backends.nvme.codes import UNDECIDED, join_drains
from sglang_hicache_ext.storage_backends.nvme.index import PAGE, Index
from sglang_hicache_ext.storage_backends.nvme.lanes import Lanes
from sglang_hicache_ext.storage_backends.nvme.plans import ZERO_PAD, pages_of, plan_pages
from sglang_hicache_ext.storage_backends.nvme.segments import SegmentTable
from sglang_hicache_ext.storage_backends.nvme.space import Extent, Space
from sglang_hicache_ext.storage_backends.nvme.writes import (
    FULL,
    FULL_ERRORS,
    LATE,
    PRESENT,
    STORED,
    WRITE_ERROR,
    Batch,
    WriteCall,
    encode_tables,
    write_tables,
)
from sglang_hicache_ext.storage_backends.record import (
    MAX_TABLE_PAGES,
    PageDigests,
    merge_columns,
    table_bytes,
)

STRIPE_BYTES = 1 << 20
"""A directory's share of a batch is at least this, so that small batches stay one submission."""


class Writer:
    """Thread-safe: threads share the open segments and write different extents of them."""

    def __init__(
        self, index: Index, space: Space, lanes: Lanes, bounce: BouncePool, metrics: Metrics, *, sync: bool,
        point: Callable[[str], None], index_full: Callable[[], bool],
    ) -> None:  # fmt: skip
        """``index_full`` makes room in the index, False when it cannot."""
        self._index, self._space, self._lanes = index, space, lanes
        self._bounce, self._metrics, self._sync, self._point = bounce, metrics, sync, point
        self._index_full = index_full
        self._segments = SegmentTable(index)

    def write(self, call: WriteCall) -> None:
        """Fill ``call.codes``."""
        rows = self._missing(call)
        call.digests = [b""] * len(call.keys)
        stride = align_up(call.regions.page_bytes)
        batches = self._place(call, rows, stride)
        self._point("extent_taken")
        try:
            self._lanes.run(lambda batch: self._write_batch(call, batch, stride), batches)
            self._point("before_publish")
            self._publish(call, batches)
            self._point("after_publish")
        finally:
            for batch in batches:
                for extent in batch.extents:
                    self._space.finish(extent, batch.drain)

    def _missing(self, call: WriteCall) -> NDArray[np.int64]:
        """Positions that must be written: not stored yet, each key once."""
        found, entries = self._index.lookup(call.number, call.keys)
        same = found & (entries["nbytes"] == call.regions.page_bytes)
        call.codes[same] = PRESENT
        other = np.flatnonzero(found & ~same)
        if len(other):  # a page of another size under this key cannot be what this namespace means
            with self._index.write() as txn:
                gone = self._index.swap(txn, call.number, [call.keys[r] for r in other.tolist()], entries[other], None)
                for segment in entries["segment"][other[gone]].tolist():
                    self._segments.add_live(txn, segment, -1)
        rows = np.flatnonzero(~same)
        first = {call.keys[r]: r for r in reversed(rows.tolist())}
        if len(first) == len(rows):
            return rows
        return np.asarray(sorted(first.values()), np.int64)

    def _place(self, call: WriteCall, rows: NDArray[np.int64], stride: int) -> list[Batch]:
        """Space for ``rows``: contiguous runs over the directories, each run adjacent on disk."""
        if not len(rows):
            return []
        if not largest_batch(stride, self._space.segment_bytes):
            call.codes[rows] = FULL
            self._metrics.add("pages_larger_than_a_segment", len(rows))
            return []
        directories = self._space.directories
        per = max(-(-len(rows) // directories), -(-STRIPE_BYTES // stride)) if directories > 1 else len(rows)
        extents: list[Extent] = []
        for start in range(0, len(rows), per):
            run = rows[start : start + per]
            for _ in range(directories):  # a full or broken drive does not refuse what another can take
                got = self._space.take(self._space.next_directory(), run, stride, call.deadline)
                extents += got
                run = run[sum(len(e.rows) for e in got) :]
                if not len(run):
                    break
            call.codes[run] = FULL
        return self._batches(extents, stride)

    def _batches(self, extents: list[Extent], stride: int) -> list[Batch]:
        by_lane: dict[int, list[Extent]] = {}
        for extent in extents:
            by_lane.setdefault(self._lanes.number_of(extent.directory), []).append(extent)
        out = []
        for number, mine in by_lane.items():
            mine.sort(key=lambda e: (e.owner.segment.number, e.offset))
            blocks = [
                (e.offset + table_bytes(len(e.rows))) // ALIGN + np.arange(len(e.rows)) * (stride // ALIGN)
                for e in mine
            ]
            segments = np.repeat([e.owner.segment.number for e in mine], [len(e.rows) for e in mine])
            rows = np.concatenate([e.rows for e in mine])
            out.append(Batch(self._lanes.all[number], mine, rows, segments, np.concatenate(blocks)))
        return out

    def append(self, call: WriteCall, extents: list[Extent]) -> NDArray[np.void]:
        """Write pages that are in the index already into ``extents``; [rows] PAGE: where each is now.

        For reclaim. Rows whose write failed have ``nbytes`` 0. The caller finishes the extents.
        """
        call.digests = [b""] * len(call.keys)
        batches = self._batches(extents, align_up(call.regions.page_bytes))
        for batch in batches:
            self._write_batch(call, batch, align_up(call.regions.page_bytes))
            for extent in batch.extents:
                extent.drain = batch.drain
        places = np.zeros(len(call.keys), PAGE)
        rows, entries = self._entries(call, batches)
        places[rows] = entries
        return places

    # -------------------------------------------------------------------------------------------- one lane

    def _write_batch(self, call: WriteCall, batch: Batch, stride: int) -> None:
        handles = batch.lane.acquire(sorted({e.owner.segment.number for e in batch.extents}))
        try:
            files = np.asarray([handles[s] for s in batch.segments.tolist()], np.int64)
            if (files < 0).any():
                call.codes[batch.rows] = WRITE_ERROR
                self._metrics.add("write_open_errors")
                return
            if call.regions.is_aligned:
                self._write_payload(call, batch, files.astype(np.int32), slice(0, len(batch.rows)), None)
            else:
                wave = self._bounce.pages_per_slot(stride)
                for start in range(0, len(batch.rows), wave):
                    self._write_wave(call, batch, files.astype(np.int32), slice(start, start + wave), stride)
                self._metrics.add("bounced_write_pages", len(batch.rows))
            self._point("payload_written")
            write_tables(call, batch, handles, self._metrics)
            self._point("table_written")
            if self._sync:
                self._make_durable(call, batch, handles)
        finally:
            batch.lane.release(handles)

    def _write_wave(self, call: WriteCall, batch: Batch, files: NDArray[np.int32], part: slice, stride: int) -> None:
        slot = self._bounce.take(stride, call.deadline)
        if slot is None:
            call.codes[batch.rows[part]] = LATE
            return
        drain: Drain | None = None
        try:
            gather(call.regions, batch.rows[part].tolist(), slot.addr, stride)
            drain = self._write_payload(call, batch, files, part, slot)
        finally:
            self._bounce.give(slot, drain)

    def _write_payload(
        self, call: WriteCall, batch: Batch, files: NDArray[np.int32], part: slice, slot: Slot | None
    ) -> Drain | None:
        rows = batch.rows[part]
        own = call.regions.take(rows)
        merged = merge_columns(own)
        source = merged if slot is None else slot.rows(len(rows), align_up(own.page_bytes))
        pages = plan_pages(
            files[part],
            batch.segments[part],
            batch.blocks[part],
            source,
            pad=ZERO_PAD,
            owner=(call.regions.owner, slot),
        )
        positions = rows.tolist()
        digest = PageDigests(call.ns_id, [call.keys[r] for r in positions], merged).digest
        is_last = part.stop >= len(batch.rows)
        left = len(positions)

        def hash_pages(ops: NDArray[np.int64]) -> None:
            nonlocal left
            for page in pages_of(ops, pages.first):
                call.digests[positions[page]] = digest(page)
                left -= 1
            if is_last and not left:  # the device still works on the last pages
                batch.tables = encode_tables(call, batch)

        result = batch.lane.engine.write(pages.plan, max(0.0, call.deadline - time.monotonic()), hash_pages)
        self._metrics.add("device_writes", len(pages.plan))
        late = self._settle(call, rows, pages.first, result.res, pages.plan.op_bytes)
        if result.drain is not None:
            batch.drain = join_drains([batch.drain, result.drain])
            if slot is None:
                call.drains.append((late, result.drain))
        return result.drain

    def _settle(
        self,
        call: WriteCall,
        rows: NDArray[np.int64],
        first: NDArray[np.int64],
        res: NDArray[np.int64],
        wanted: NDArray[np.int64],
    ) -> list[int]:
        """Give the pages of failed operations their code; returns the rows still being read by the device."""
        late: list[int] = []
        for op in np.flatnonzero(res != wanted).tolist():
            value, span = int(res[op]), rows[int(first[op]) : int(first[op + 1])]
            if value in (PENDING, TIMED_OUT):
                call.codes[span] = LATE
            else:
                call.codes[span] = FULL if -value in FULL_ERRORS else WRITE_ERROR
                self._metrics.add(f"write_errors_{errno.errorcode.get(-value, 'short').lower()}")
            if value == PENDING:
                late += span.tolist()
        return late

    def _make_durable(self, call: WriteCall, batch: Batch, handles: dict[int, int]) -> None:
        for segment, handle in handles.items():
            try:
                batch.lane.engine.sync(handle)
            except OSError as err:
                rows = batch.rows[batch.segments == segment]
                call.codes[rows[call.codes[rows] == UNDECIDED]] = WRITE_ERROR
                self._metrics.add(f"sync_errors_{errno.errorcode.get(err.errno or 0, 'unknown').lower()}")

    # -------------------------------------------------------------------------------------------- publish

    def _publish(self, call: WriteCall, batches: list[Batch]) -> None:
        """Make the pages whose bytes are in place findable; then answer for the keys that came twice."""
        rows, entries = self._entries(call, batches)
        if len(rows):
            call.codes[rows] = self._insert(call.number, [call.keys[r] for r in rows.tolist()], entries)
        self._answer_twins(call)

    def _entries(self, call: WriteCall, batches: list[Batch]) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """(rows, PAGE) of the pages whose bytes and table are in place."""
        rows = np.concatenate([b.rows for b in batches]) if batches else np.zeros(0, np.int64)
        good = np.flatnonzero(call.codes[rows] == UNDECIDED)
        entries = np.zeros(len(good), PAGE)
        if not len(good):
            return rows[good], entries
        entries["segment"] = np.concatenate([b.segments for b in batches])[good]
        entries["block"] = np.concatenate([b.blocks for b in batches])[good]
        generation = {e.owner.segment.number: e.owner.segment.generation for b in batches for e in b.extents}
        entries["generation"] = [generation[s] for s in entries["segment"].tolist()]
        entries["nbytes"] = call.regions.page_bytes
        rows = rows[good]
        entries["digest"] = np.frombuffer(b"".join(call.digests[r] for r in rows.tolist()), "V16")
        return rows, entries

    def _insert(self, number: int, keys: list[bytes], entries: NDArray[np.void]) -> NDArray[np.int8]:
        size = self._index.slice_keys
        parts = [
            self._insert_slice(number, keys[at : at + size], entries[at : at + size])
            for at in range(0, len(keys), size)
        ]
        return np.concatenate(parts)

    def _insert_slice(
        self, number: int, keys: list[bytes], entries: NDArray[np.void], retry: bool = True
    ) -> NDArray[np.int8]:
        try:
            with self._index.write() as txn:
                new = self._index.put_new(txn, number, keys, entries)
                segments, counts = np.unique(entries["segment"][new], return_counts=True)
                for segment, count in zip(segments.tolist(), counts.tolist(), strict=True):
                    self._segments.add_live(txn, segment, count)
            return np.where(new, STORED, PRESENT).astype(np.int8)
        except lmdb.MapFullError:
            self._metrics.add("index_full")
            if retry and self._index_full():
                return self._insert_slice(number, keys, entries, retry=False)
        except lmdb.Error as err:
            self._metrics.add("index_write_errors")
            if "space" not in str(err).lower():
                return np.full(len(keys), WRITE_ERROR, np.int8)
        return np.full(len(keys), FULL, np.int8)

    @staticmethod
    def _answer_twins(call: WriteCall) -> None:
        twins = np.flatnonzero(call.codes == UNDECIDED)
        if not len(twins):
            return
        first = {key: row for row, key in reversed(list(enumerate(call.keys)))}
        for row in twins.tolist():
            answer = call.codes[first[call.keys[row]]]
            call.codes[row] = PRESENT if answer == STORED else answer


def largest_batch(stride: int, segment_bytes: int) -> int:
    """Pages of ``stride`` bytes that fit one segment; 0: such a page cannot be stored."""
    pages = min(MAX_TABLE_PAGES, max(0, (segment_bytes - ALIGN) // stride))
    while pages and table_bytes(pages) + pages * stride > segment_bytes - ALIGN:
        pages -= 1
    return pages
