"""Pages by layer: written whole, read and proven one layer at a time."""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb
import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import ALIGN, Regions, regions_of_array
from sglang_hicache_ext.ports import Drain, Namespace, WriteResult
from sglang_hicache_ext.storage_backends.engines.base import PENDING, TIMED_OUT
from sglang_hicache_ext.storage_backends.nvme.codes import READ_CODE, UNDECIDED, count_reads, join_drains, read_outcomes
from sglang_hicache_ext.storage_backends.nvme.lanes import Lane, Lanes
from sglang_hicache_ext.storage_backends.nvme.layered import (
    LAYER,
    LayeredGeometry,
    fill_headers,
    layer_keys,
    read_header,
)
from sglang_hicache_ext.storage_backends.nvme.plans import SINK_PAD, pages_of, plan_pages
from sglang_hicache_ext.storage_backends.nvme.reader import SHORT, UNPROVEN, ReadCall
from sglang_hicache_ext.storage_backends.record import PageDigests

if TYPE_CHECKING:
    from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

LOADED, READ_ERROR, LATE, CORRUPT, EVICTED, MISMATCH = (
    READ_CODE[o]
    for o in (
        Outcome.LOADED,
        Outcome.READ_ERROR,
        Outcome.LATE,
        Outcome.CORRUPT,
        Outcome.EVICTED,
        Outcome.MISMATCH,
    )
)

Prove = Callable[[int], bool]
"""Whether the bytes of the page at a position of the call are what they should be."""
Sums = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""[rows] positions in the call -> [rows, 2] sums of the bytes that now lie in device memory."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """codes: [rows] of codes.READS. ``drain`` tells when rows ``draining`` can no longer be written to."""

    codes: NDArray[np.int8]
    draining: tuple[int, ...] = ()
    drain: Drain | None = None

    @property
    def is_loaded(self) -> bool:
        return bool((self.codes == LOADED).all())


class LayeredPages:
    """One geometry of layered pages in a store. Thread-safe."""

    def __init__(self, store: NvmeStore, geometry: LayeredGeometry) -> None:
        self.store, self.geometry = store, geometry

    def write(
        self, ns: Namespace, keys: Sequence[bytes], memory: NDArray[np.uint8], sums: NDArray[np.int64] | None = None
    ) -> WriteResult:
        """Head and write pages; ``memory`` is [pages, page_bytes] with the layers in place, its headers are filled in."""
        if sums is None:
            sums = np.zeros((len(keys), self.geometry.layers, 2), np.int64)
        fill_headers(ns.id, keys, memory, self.geometry, sums)
        result: WriteResult = self.store.write(ns, keys, regions_of_array(memory))
        return result

    def open(self, ns: Namespace, keys: Sequence[bytes], deadline: float, lanes: Lanes | None = None) -> LayeredRead:
        """Look pages up and read their headers; ``lanes`` are other engines for the layers than the store's own."""
        return LayeredRead(self.store, self.geometry, ns, list(keys), deadline, lanes)


class LayeredRead:
    """One load: the pages, where they lie, and what each layer must prove. Layers may be read by several threads.

    Attributes:
        codes: [pages] of codes.READS, LOADED while a page is good so far.
    """

    def __init__(
        self,
        store: NvmeStore,
        geometry: LayeredGeometry,
        ns: Namespace,
        keys: list[bytes],
        deadline: float,
        lanes: Lanes | None,
    ) -> None:
        self.geometry, self.keys = geometry, keys
        self._store, self._parts, self._ns = store, store.parts(ns), ns
        self._lanes = lanes or self._parts.lanes
        self._lock = threading.Lock()
        self.codes = np.full(len(keys), UNDECIDED, np.int8)
        with store.call():
            found, entries = self._parts.index.lookup(self._parts.number, keys)
            self._entries = entries.copy()
            wrong = found & (entries["nbytes"] != geometry.page_bytes)
            self.codes[wrong] = MISMATCH
            self._headers = np.zeros((len(keys), geometry.layers), LAYER)
            rows = np.flatnonzero(found & ~wrong)
            self._read_headers(rows, deadline)
            self._parts.explainer.decide(ns, self._parts.number, keys, self.codes)
            good = self._entries[self.codes == LOADED]
            self._parts.heat.mark_read(good["segment"], good["block"])

    @property
    def is_loaded(self) -> bool:
        """Every page is there and its header is proven."""
        return bool((self.codes == LOADED).all())

    def fail(self, rows: NDArray[np.int64], codes: NDArray[np.int8]) -> None:
        """Note the outcome of pages whose layer did not load; the first failure of a page counts."""
        with self._lock:
            fresh = self.codes[rows] == LOADED
            self.codes[rows[fresh]] = codes[fresh]

    def count(self) -> tuple[Outcome, ...]:
        """Count every page once, at the end of the load."""
        counts = count_reads(self.codes)
        self._store.metrics.pages(counts)
        self._store.metrics.add("read_bytes", counts.get(Outcome.LOADED, 0) * self.geometry.page_bytes)
        outcomes: tuple[Outcome, ...] = read_outcomes(self.codes)
        return outcomes

    # -------------------------------------------------------------------------------------------- headers

    def _read_headers(self, rows: NDArray[np.int64], deadline: float) -> None:
        if not len(rows):
            return
        codes = self._header_pass(rows, deadline)
        bad = np.flatnonzero((codes == UNPROVEN) | (codes == SHORT))
        if len(bad):
            codes[bad] = self._second_look(rows[bad], lambda part: self._header_pass(part, deadline))
        self.codes[rows] = codes

    def _header_pass(self, rows: NDArray[np.int64], deadline: float) -> NDArray[np.int8]:
        """Read the headers of ``rows`` and keep those that prove themselves."""
        size = self.geometry.header_bytes
        memory = mmap.mmap(-1, size * len(rows))  # a late read drains into it: the plan keeps it
        base = np.frombuffer(memory, np.uint8).ctypes.data
        addrs = np.uint64(base) + np.arange(len(rows), dtype=np.uint64) * np.uint64(size)
        regions = Regions(addrs[:, None], np.asarray([size], np.int64), memory)

        def prove(at: int) -> bool:
            row = int(rows[at])
            layers = read_header(self._ns.id, self.keys[row], memory[at * size : (at + 1) * size], self.geometry)
            if layers is not None:
                self._headers[row] = layers
            return layers is not None

        return self._move(self._parts.lanes, rows, 0, regions, deadline, prove).codes

    # -------------------------------------------------------------------------------------------- layers

    def read_layer(
        self, layer: int, rows: NDArray[np.int64], regions: Regions, deadline: float, sums: Sums | None = None
    ) -> LayerResult:
        """Read one layer of pages ``rows`` into ``regions`` (row i for rows[i]).

        Args:
            deadline: monotonic; what is not there by then is LATE.
            sums: how bytes in device memory prove themselves; None hashes host memory.
        """
        drains: list[tuple[list[int], Drain]] = []

        def read(at: NDArray[np.int64]) -> NDArray[np.int8]:
            part, place = rows[at], regions.take(at)
            prove = None if sums is not None else self._prover(layer, part, place)
            result = self._move(self._lanes, part, self.geometry.offset(layer), place, deadline, prove)
            if result.drain is not None:
                drains.append((at[list(result.draining)].tolist(), result.drain))
            if sums is not None:
                self._prove_sums(layer, part, result.codes, lambda some: sums(at[some]))
            return result.codes

        with self._store.call():
            codes = read(np.arange(len(rows)))
            bad = np.flatnonzero((codes == UNPROVEN) | (codes == SHORT))
            if len(bad):
                where = {row: at for at, row in enumerate(rows.tolist())}
                try:
                    codes[bad] = self._second_look(
                        rows[bad], lambda part: read(np.asarray([where[r] for r in part.tolist()], np.int64)), deadline
                    )
                except (lmdb.Error, OSError):
                    if not drains:
                        raise
                    codes[bad] = READ_ERROR  # the caller must hear of the memory that is still in use
        draining = tuple(sorted(r for part, _ in drains for r in part))
        return LayerResult(codes, draining, join_drains([d for _, d in drains]))

    def _prover(self, layer: int, rows: NDArray[np.int64], regions: Regions) -> Prove:
        keys = layer_keys([self.keys[r] for r in rows.tolist()], layer)
        digest = PageDigests(self._ns.id, keys, regions).digest
        raw = self._headers["digest"][rows, layer].tobytes()
        return lambda at: digest(at) == raw[at * 16 : at * 16 + 16]

    def _prove_sums(self, layer: int, rows: NDArray[np.int64], codes: NDArray[np.int8], sums: Sums) -> None:
        """Pages that arrived in device memory are LOADED only when their sums say so; a page without sums is not."""
        arrived = np.flatnonzero(codes == LOADED)
        if not len(arrived):
            return
        expected = self._headers["sums"][rows[arrived], layer]
        right = (sums(arrived) == expected).all(axis=1) & expected.any(axis=1)
        codes[arrived[~right]] = UNPROVEN

    # -------------------------------------------------------------------------------------------- second look

    def _second_look(
        self,
        rows: NDArray[np.int64],
        read: Callable[[NDArray[np.int64]], NDArray[np.int8]],
        header_deadline: float | None = None,
    ) -> NDArray[np.int8]:
        """Read ``rows`` again where they lie now; wrong bytes under an unchanged entry are proof of corruption.

        A page that was moved or written anew meanwhile must still have the header that its other layers were proven
        by: layers of two computations are never mixed.
        """
        self._store.metrics.add("read_retried_pages", len(rows))
        for segment in np.unique(self._entries["segment"][rows]).tolist():
            self._lanes.of_segment(segment).refresh(segment)
        found, fresh = self._parts.index.lookup(self._parts.number, [self.keys[r] for r in rows.tolist()])
        there = found & (fresh["nbytes"] == self.geometry.page_bytes)
        changed = there & (_raw(fresh) != _raw(self._entries[rows])).any(axis=1)
        with self._lock:
            self._entries[rows[there]] = fresh[there]
        if header_deadline is not None and changed.any():
            there[np.flatnonzero(changed)] = self._same_headers(rows[changed], header_deadline)
        codes = np.full(len(rows), EVICTED, np.int8)
        again = np.flatnonzero(there)
        if len(again):
            codes[again] = read(rows[again])
        self._judge(rows, codes, fresh)
        return codes

    def _same_headers(self, rows: NDArray[np.int64], deadline: float) -> NDArray[np.bool_]:
        before = _raw(self._headers[rows]).copy()
        good = self._header_pass(rows, deadline) == LOADED
        same: NDArray[np.bool_] = good & (_raw(self._headers[rows]) == before).all(axis=1)
        return same

    def _judge(self, rows: NDArray[np.int64], codes: NDArray[np.int8], entries: NDArray[np.void]) -> None:
        reader, call = self._parts.reader, self._as_call()
        for at in np.flatnonzero(codes == SHORT).tolist():
            codes[at] = UNPROVEN if reader.is_truncated(entries[at]) else READ_ERROR
        bad = np.flatnonzero(codes == UNPROVEN)
        if not len(bad):
            return
        full = np.zeros(len(self.keys), entries.dtype)
        full[rows] = entries
        gone = reader.drop(call, rows[bad], full)
        codes[bad] = np.where(gone, CORRUPT, EVICTED)

    def _as_call(self) -> ReadCall:
        empty = Regions(np.zeros((0, 1), np.uint64), np.zeros(1, np.int64))
        return ReadCall(self._ns.id, self._parts.number, self.keys, empty, 0.0, self.codes, [])

    # -------------------------------------------------------------------------------------------- one transfer

    def _move(
        self,
        lanes: Lanes,
        rows: NDArray[np.int64],
        shift: int,
        regions: Regions,
        deadline: float,
        prove: Prove | None,
    ) -> LayerResult:
        """Read ``regions.page_bytes`` bytes at ``shift`` of each page, in disk order."""
        codes = np.full(len(rows), UNDECIDED, np.int8)
        picked = self._entries[rows]
        order = np.lexsort((picked["block"], picked["segment"]))
        drains: list[tuple[list[int], Drain]] = []
        jobs: list[tuple[Lane, NDArray[np.int64]]] = []
        lane_of = np.asarray([lanes.number_of(s % len(self._parts.layout.roots)) for s in picked["segment"].tolist()])
        for number in np.unique(lane_of).tolist():
            mine = order[lane_of[order] == number]
            segments = picked["segment"][mine]
            starts = np.unique(segments)
            most = lanes.all[number].most_files
            for at in range(0, len(starts), most):
                jobs.append((lanes.all[number], mine[np.isin(segments, starts[at : at + most])]))
        work = lambda job: self._move_lane(job[0], job[1], picked, shift, regions, deadline, prove, codes)  # noqa: E731
        for part in lanes.run(work, jobs):
            drains += part
        rows_left = tuple(sorted(r for part, _ in drains for r in part))
        return LayerResult(codes, rows_left, join_drains([d for _, d in drains]))

    def _move_lane(
        self,
        lane: Lane,
        at: NDArray[np.int64],
        entries: NDArray[np.void],
        shift: int,
        regions: Regions,
        deadline: float,
        prove: Prove | None,
        codes: NDArray[np.int8],
    ) -> list[tuple[list[int], Drain]]:
        segments = np.unique(entries["segment"][at]).tolist()
        handles = lane.acquire(segments)
        try:
            files = np.asarray([handles[s] for s in entries["segment"][at].tolist()], np.int32)
            codes[at[files < 0]] = READ_ERROR
            codes[at[files == -errno.ENOENT]] = SHORT
            at, files = at[files >= 0], files[files >= 0]
            if not len(at):
                return []
            blocks = entries["block"][at].astype(np.int64) + shift // ALIGN
            picked = regions.take(at)
            pages = plan_pages(
                files,
                entries["segment"][at].astype(np.int64),
                blocks,
                picked,
                pad=SINK_PAD,
                owner=(regions.owner, picked),
            )
            positions = at.tolist()

            def verify(ops: NDArray[np.int64]) -> None:
                for page in pages_of(ops, pages.first):
                    where = positions[page]
                    codes[where] = LOADED if prove is None or prove(where) else UNPROVEN

            result = lane.engine.read(pages.plan, max(0.0, deadline - time.monotonic()), verify)
            self._store.metrics.add("device_reads", len(pages.plan))
            draining = self._settle(result.res, pages.plan.op_bytes, pages.first, positions, codes)
            return [(draining, result.drain)] if result.drain is not None else []
        finally:
            with contextlib.suppress(OSError):
                lane.release(handles)

    def _settle(
        self,
        res: NDArray[np.int64],
        wanted: NDArray[np.int64],
        first: NDArray[np.int64],
        positions: list[int],
        codes: NDArray[np.int8],
    ) -> list[int]:
        draining: list[int] = []
        for op in np.flatnonzero(res != wanted).tolist():
            value = int(res[op])
            span = positions[int(first[op]) : int(first[op + 1])]
            if value in (PENDING, TIMED_OUT):
                codes[span] = LATE
            elif value < 0:
                codes[span] = READ_ERROR
                self._store.metrics.add(f"read_errors_{errno.errorcode.get(-value, str(-value)).lower()}")
            else:
                codes[span] = SHORT
            if value == PENDING:
                draining += span
        return draining


def _raw(rows: NDArray[np.void]) -> NDArray[np.uint8]:
    """[rows, bytes] of structured rows, for comparing them."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
