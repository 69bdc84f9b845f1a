"""The read path: one lookup, operations in disk order, every page verified while later ones are in flight."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import ALIGN, Regions, align_up
from sglang_hicache_ext.ports import Drain
from sglang_hicache_ext.storage_backends.engines.base import PENDING, TIMED_OUT
from sglang_hicache_ext.storage_backends.nvme.bounce import BouncePool, scatter
from sglang_hicache_ext.storage_backends.nvme.codes import READ_CODE, UNDECIDED, join_drains
from sglang_hicache_ext.storage_backends.nvme.heat import Heat
from sglang_hicache_ext.storage_backends.nvme.index import Index
from sglang_hicache_ext.storage_backends.nvme.lanes import Lane, Lanes
from sglang_hicache_ext.storage_backends.nvme.layout import Layout
from sglang_hicache_ext.storage_backends.nvme.plans import SINK_PAD, pages_of, plan_pages
from sglang_hicache_ext.storage_backends.nvme.segments import SegmentTable
from sglang_hicache_ext.storage_backends.record import PageDigests, memory_at, merge_columns, page_digest

LOADED, READ_ERROR, LATE = (READ_CODE[o] for o in (Outcome.LOADED, Outcome.READ_ERROR, Outcome.LATE))
CORRUPT, EVICTED, MISMATCH = (READ_CODE[o] for o in (Outcome.CORRUPT, Outcome.EVICTED, Outcome.MISMATCH))
UNPROVEN, SHORT = -2, -3
"""Passing codes: the bytes did not prove themselves; the file ended early. Both get a second look."""


@dataclass(slots=True)
class ReadCall:
    """One call's pages; ``codes`` is filled in as they end."""

    ns_id: bytes
    number: int
    keys: Sequence[bytes]
    regions: Regions
    deadline: float
    codes: NDArray[np.int8]
    drains: list[tuple[list[int], Drain]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Pages to read on one lane, in disk order: positions in the call and what the index says of them."""

    lane: Lane
    rows: NDArray[np.int64]
    entries: NDArray[np.void]


class Reader:
    """Thread-safe; keeps no state between calls."""

    def __init__(
        self, layout: Layout, index: Index, heat: Heat, lanes: Lanes, bounce: BouncePool, metrics: Metrics
    ) -> None:
        self._layout, self._index, self._heat = layout, index, heat
        self._lanes, self._bounce, self._metrics = lanes, bounce, metrics
        self._segments = SegmentTable(index)

    def answer(self, call: ReadCall, explain: Callable[[], None]) -> None:
        """Read, and ``explain`` what is not there. An error ends the call as misses when its memory is still in use, so
        that the caller hears of the drain."""
        try:
            self.read(call)
            explain()
        except (lmdb.Error, OSError):
            if not call.drains:
                raise
            self._metrics.add("reads_cut_short")
            call.codes[call.codes < 0] = READ_ERROR

    def read(self, call: ReadCall) -> None:
        """Fill ``call.codes``. Pages that are not in the index (any more) stay UNDECIDED."""
        entries = self._pass(call, np.arange(len(call.keys)))
        again = np.flatnonzero((call.codes == UNPROVEN) | (call.codes == SHORT))
        if not len(again):
            return
        # The segment may have been reused since the lookup, or an open file may be stale: look once more.
        self._metrics.add("read_retried_pages", len(again))
        for segment in np.unique(entries["segment"][again]).tolist():
            self._lanes.of_segment(segment).refresh(segment)
        call.codes[again] = UNDECIDED
        entries[again] = self._pass(call, again)[again]
        self._judge(call, again, entries)

    def _pass(self, call: ReadCall, rows: NDArray[np.int64]) -> NDArray[np.void]:
        """Look up and read ``rows``; returns the index entries, one row per key of the call."""
        keys = call.keys
        found, entries = self._index.lookup(call.number, keys if len(rows) == len(keys) else [keys[r] for r in rows])
        if len(rows) != len(keys):
            full = np.zeros(len(keys), entries.dtype)
            full[rows] = entries
            present = np.zeros(len(keys), np.bool_)
            present[rows] = found
            found, entries = present, full
        sane = self._sane(call, found, entries)
        jobs = self._split(sane, entries)
        self._lanes.run(lambda job: self._read_lane(call, job), jobs)
        loaded = sane[call.codes[sane] == LOADED]
        if len(loaded):
            self._heat.mark_read(entries["segment"][loaded], entries["block"][loaded])
        return entries if entries.flags.writeable else entries.copy()

    def _sane(self, call: ReadCall, found: NDArray[np.bool_], entries: NDArray[np.void]) -> NDArray[np.int64]:
        """Rows worth an I/O. An entry that points outside its segment is damaged: proof enough."""
        want = call.regions.page_bytes
        end = entries["block"].astype(np.int64) * ALIGN + align_up(want)
        inside = (entries["segment"] < self._layout.max_segments) & (end <= self._layout.segment_bytes)
        good = entries["nbytes"] == want
        if good.all() and inside.all():
            return np.arange(len(entries))
        call.codes[found & ~good] = MISMATCH
        bad = np.flatnonzero(good & ~inside)
        call.codes[bad] = CORRUPT
        if len(bad):
            self.drop(call, bad, entries)
        return np.flatnonzero(good & inside)

    def _split(self, rows: NDArray[np.int64], entries: NDArray[np.void]) -> list[_Rows]:
        if not len(rows):
            return []
        picked = entries[rows]
        order = np.lexsort((picked["block"], picked["segment"]))
        rows, picked = rows[order], picked[order]
        if len(self._lanes.all) == 1:
            return [_Rows(self._lanes.all[0], rows, picked)]
        lane_of = picked["segment"] % len(self._layout.roots)
        jobs = []
        for number in np.unique(lane_of).tolist():
            mine = lane_of == number
            jobs.append(_Rows(self._lanes.all[self._lanes.number_of(number)], rows[mine], picked[mine]))
        return jobs

    # -------------------------------------------------------------------------------------------- one lane

    def _read_lane(self, call: ReadCall, job: _Rows) -> None:
        segments = _distinct(job.entries["segment"])
        most = job.lane.most_files
        for start in range(0, len(segments), most):  # more files than may be open at once
            part = job
            if len(segments) > most:
                here = np.isin(job.entries["segment"], segments[start : start + most])
                part = _Rows(job.lane, job.rows[here], job.entries[here])
            self._read_files(call, part, segments[start : start + most].tolist())

    def _read_files(self, call: ReadCall, job: _Rows, segments: list[int]) -> None:
        handles = job.lane.acquire(segments)
        try:
            if len(segments) == 1:
                files = np.full(len(job.rows), handles[segments[0]], np.int32)
            else:
                table = np.zeros(max(segments) + 1, np.int32)
                table[segments] = [handles[s] for s in segments]
                files = table[job.entries["segment"]]
            if min(handles.values()) < 0:
                job, files = self._opened(call, job, files)
            if not len(job.rows):
                return
            if call.regions.is_aligned:
                self._read_direct(call, job, files)
            else:
                self._read_bounced(call, job, files)
        finally:
            job.lane.release(handles)

    def _opened(self, call: ReadCall, job: _Rows, files: NDArray[np.int32]) -> tuple[_Rows, NDArray[np.int32]]:
        """Leave out the pages whose file could not be opened, with their code set."""
        call.codes[job.rows[files < 0]] = READ_ERROR
        call.codes[job.rows[files == -errno.ENOENT]] = SHORT
        self._metrics.add("read_open_errors", int((files < 0).sum()))
        good = files >= 0
        return _Rows(job.lane, job.rows[good], job.entries[good]), files[good]

    def _read_direct(self, call: ReadCall, job: _Rows, files: NDArray[np.int32]) -> None:
        rows = job.rows.tolist()
        merged = merge_columns(call.regions.take(job.rows))
        codes = np.full(len(rows), UNDECIDED, np.int8)
        pages = plan_pages(files, *_places(job.entries), merged, pad=SINK_PAD, owner=(call.regions.owner, merged))
        first = pages.first
        proof: _Proof | None = None

        def verify(ops: NDArray[np.int64]) -> None:
            nonlocal proof
            if proof is None:  # made here, while the device already works
                proof = _Proof(call, rows, merged, job.entries)
            proof.check(pages_of(ops, first), codes)

        result = job.lane.engine.read(pages.plan, max(0.0, call.deadline - time.monotonic()), verify)
        draining = self._settle(result.res, pages.plan.op_bytes, first, codes)
        if result.drain is not None:  # noted at once: whatever fails later, the caller must hear of it
            call.drains.append(([rows[p] for p in draining], result.drain))
        call.codes[job.rows] = codes
        self._metrics.add("device_reads", len(pages.plan))

    def _settle(
        self, res: NDArray[np.int64], wanted: NDArray[np.int64], first: NDArray[np.int64], codes: NDArray[np.int8]
    ) -> list[int]:
        """Give pages of operations that did not end in full their code; returns pages still being written to."""
        odd = np.flatnonzero(res != wanted)
        draining: list[int] = []
        for op in odd.tolist():
            value = int(res[op])
            span = slice(int(first[op]), int(first[op + 1]))
            if value in (PENDING, TIMED_OUT):
                codes[span] = LATE
            elif value < 0:
                codes[span] = READ_ERROR
                self._metrics.add(f"read_errors_{errno.errorcode.get(-value, str(-value)).lower()}")
            else:
                codes[span] = SHORT
            if value == PENDING:
                draining += range(span.start, span.stop)
        return draining

    def _read_bounced(self, call: ReadCall, job: _Rows, files: NDArray[np.int32]) -> None:
        """Through aligned memory, a wave at a time. A late wave drains into our memory, so the host's is free."""
        stride = align_up(call.regions.page_bytes)
        wave = self._bounce.pages_per_slot(stride)
        for start in range(0, len(job.rows), wave):
            part = _Rows(job.lane, job.rows[start : start + wave], job.entries[start : start + wave])
            self._read_wave(call, part, files[start : start + wave], stride)
        self._metrics.add("bounced_read_pages", len(job.rows))

    def _read_wave(self, call: ReadCall, job: _Rows, files: NDArray[np.int32], stride: int) -> None:
        slot = self._bounce.take(stride, call.deadline)
        if slot is None:
            call.codes[job.rows] = LATE
            return
        rows, nbytes, expected = job.rows.tolist(), call.regions.page_bytes, _digests(job.entries)
        codes = np.full(len(rows), UNDECIDED, np.int8)
        pages = plan_pages(files, *_places(job.entries), slot.rows(len(rows), stride), pad=SINK_PAD, owner=slot)

        def verify(ops: NDArray[np.int64]) -> None:
            for page in pages_of(ops, pages.first):
                at, row = slot.addr + page * stride, rows[page]
                if page_digest(call.ns_id, call.keys[row], memory_at(at, nbytes)) == expected[page]:
                    scatter(at, call.regions, row)
                    codes[page] = LOADED
                else:
                    codes[page] = UNPROVEN

        drain: Any = None
        try:
            result = job.lane.engine.read(pages.plan, max(0.0, call.deadline - time.monotonic()), verify)
            drain = result.drain
            self._settle(result.res, pages.plan.op_bytes, pages.first, codes)
            call.codes[job.rows] = codes
            self._metrics.add("device_reads", len(pages.plan))
        finally:
            self._bounce.give(slot, drain)

    # -------------------------------------------------------------------------------------------- proof

    def _judge(self, call: ReadCall, rows: NDArray[np.int64], entries: NDArray[np.void]) -> None:
        """After the second look: unchanged entry and wrong bytes are proof of corruption; a lost race is EVICTED."""
        short = [r for r in rows.tolist() if call.codes[r] == SHORT]
        for row in short:
            if self.is_truncated(entries[row]):
                call.codes[row] = UNPROVEN
            else:
                call.codes[row] = READ_ERROR
        bad = rows[call.codes[rows] == UNPROVEN]
        if not len(bad):
            return
        call.codes[bad] = CORRUPT
        gone = self.drop(call, bad, entries)
        call.codes[bad[~gone]] = EVICTED

    def is_truncated(self, entry: Any) -> bool:
        """Whether the segment file lacks the page. A whole directory that is gone (an unmounted drive) proves nothing."""
        end = int(entry["block"]) * ALIGN + align_up(int(entry["nbytes"]))
        path = self._layout.segment_path(int(entry["segment"]))
        try:
            return os.stat(path).st_size < end
        except FileNotFoundError:
            return path.parent.is_dir()
        except OSError:
            return False

    def drop(self, call: ReadCall, rows: NDArray[np.int64], entries: NDArray[np.void]) -> NDArray[np.bool_]:
        """Remove entries that are still what was read by; [rows] bool: was unchanged and is removed."""
        with self._index.write() as txn:
            gone = self._index.swap(txn, call.number, [call.keys[r] for r in rows.tolist()], entries[rows], None)
            for segment, count in zip(*np.unique(entries["segment"][rows[gone]], return_counts=True), strict=True):
                self._segments.add_live(txn, int(segment), -int(count))
        self._metrics.add("corrupt_pages_removed", int(gone.sum()))
        return gone


class _Proof:
    """What the pages of one lane must hash to."""

    def __init__(self, call: ReadCall, rows: list[int], regions: Regions, entries: NDArray[np.void]) -> None:
        self._digest = PageDigests(call.ns_id, [call.keys[r] for r in rows], regions).digest
        self._expected = _digests(entries)

    def check(self, pages: list[int], codes: NDArray[np.int8]) -> None:
        digest, expected = self._digest, self._expected
        codes[pages] = [LOADED if digest(page) == expected[page] else UNPROVEN for page in pages]


def _distinct(segments: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The segments of pages in disk order, each once."""
    if segments[0] == segments[-1]:
        return segments[:1]
    return np.unique(segments)


def _places(entries: NDArray[np.void]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return entries["segment"].astype(np.int64), entries["block"].astype(np.int64)


def _digests(entries: NDArray[np.void]) -> list[bytes]:
    raw = entries["digest"].tobytes()
    return [raw[i : i + 16] for i in range(0, len(raw), 16)]


def draining_of(call: ReadCall) -> tuple[tuple[int, ...], Drain | None]:
    """What of the call's memory is still in use, and until when."""
    rows = sorted(r for part, _ in call.drains for r in part)
    return tuple(rows), join_drains([d for part, d in call.drains if part])
