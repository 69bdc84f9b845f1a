"""Where new pages go: one open segment a directory, extents handed out of it, and making room when there is none."""

from __future__ import annotations

import concurrent.futures
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.ports import Drain
from sglang_hicache_ext.storage_backends.nvme.layout import Layout
from sglang_hicache_ext.storage_backends.nvme.segments import OpenSegment, SegmentFiles

CLOSE_WAIT_S = 5.0
"""Longest wait for a running reclaim when the store closes."""


@dataclass(slots=True)
class Extent:
    """Space for one batch: its table and then its pages."""

    owner: OpenSegment
    directory: int
    offset: int
    nbytes: int
    rows: NDArray[np.int64]
    drain: Drain | None = None


@dataclass(slots=True)
class _Directory:
    lock: Any = field(default_factory=threading.RLock)
    current: OpenSegment | None = None
    draining: list[tuple[Drain, Extent]] = field(default_factory=list)
    unsealed: list[OpenSegment] = field(default_factory=list)
    reclaim: concurrent.futures.Future[bool] | None = None
    moved: int = 0


class Space:
    """Hands out extents. Thread-safe: one lock a directory.

    A segment is sealed when it is full and the last of its extents is finished; an extent whose I/O outlived its
    call is finished when its drain is done, so its bytes are never reused under the device's hands.
    """

    def __init__(
        self, layout: Layout, files: SegmentFiles, metrics: Metrics, reclaim: Callable[[int, bool], bool], *,
        moves: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            reclaim: ``reclaim(directory, may_reinsert)`` frees one segment, False when none can be.
            moves: a reclaim may move pages into the open segment.
        """
        self._layout, self._files, self._metrics, self._reclaim = layout, files, metrics, reclaim
        self._moves = moves
        self._directories = [_Directory() for _ in layout.roots]
        self._background = concurrent.futures.ThreadPoolExecutor(1, "hicache-reclaim")
        self._turn = 0
        self._turn_lock = threading.Lock()

    @property
    def segment_bytes(self) -> int:
        return self._layout.segment_bytes

    @property
    def directories(self) -> int:
        return len(self._directories)

    def next_directory(self) -> int:
        with self._turn_lock:
            self._turn = (self._turn + 1) % len(self._directories)
            return self._turn

    def take(self, directory: int, rows: NDArray[np.int64], stride: int, deadline: float) -> list[Extent]:
        """Extents for ``rows`` in ``directory``; fewer rows than asked when the store is full.

        Args:
            deadline: monotonic seconds until which it may wait for a segment that is being freed.
        """
        out: list[Extent] = []
        place = self._directories[directory]
        with place.lock:
            while len(rows):
                kept = self._kept_for_moves(place)
                if place.current is not None and (pages := min(len(rows), place.current.fits(stride, kept))):
                    out.append(self._hand_out(place, directory, rows[:pages], stride))
                    rows = rows[pages:]
                elif kept:
                    if not self._await_reclaim(place, deadline):
                        break
                elif not self._rotate(directory, place, deadline):
                    break
        return out

    def _hand_out(self, place: _Directory, directory: int, rows: NDArray[np.int64], stride: int) -> Extent:
        assert place.current is not None
        offset, nbytes = place.current.take(len(rows), stride)
        return Extent(place.current, directory, offset, nbytes, rows)

    def _kept_for_moves(self, place: _Directory) -> int:
        """Bytes of the open segment that new pages leave to the pages a running reclaim may still move."""
        if not self._moves or place.reclaim is None or place.reclaim.done():
            return 0
        return max(0, self._layout.segment_bytes // 2 - place.moved)

    def take_rest(self, directory: int, rows: NDArray[np.int64], stride: int) -> list[Extent]:
        """As ``take`` for pages that reclaim moves: only out of what the open segment has left."""
        place = self._directories[directory]
        with place.lock:
            pages = min(len(rows), place.current.fits(stride)) if place.current is not None else 0
            if not pages:
                return []
            extent = self._hand_out(place, directory, rows[:pages], stride)
            place.moved += extent.nbytes
            return [extent]

    def free_one(self, directory: int) -> bool:
        """Reclaim one segment now; False when none can be."""
        with self._directories[directory].lock:
            return self._reclaim(directory, False)

    def _rotate(self, directory: int, place: _Directory, deadline: float) -> bool:
        """Put the next segment to use, and have another one freed meanwhile for the turn after."""
        self.collect(directory)
        if place.current is not None:
            self._retire(place, place.current)
            place.current = None
        place.current = self._open(directory)
        if place.current is None:
            self._await_reclaim(place, deadline)
            if place.current is None:  # another thread may have been here meanwhile
                place.current = self._open(directory)
        if place.current is None and self._reclaim(directory, False):
            place.current = self._open(directory)
        if place.current is None:
            return False
        if not self._has_spare(directory) and (place.reclaim is None or place.reclaim.done()):
            place.moved = 0
            place.reclaim = self._background.submit(self._reclaim, directory, True)
        return True

    def _await_reclaim(self, place: _Directory, deadline: float) -> bool:
        """Wait for the segment that is being freed; False when it takes too long or none is.

        The reclaim needs the directory's lock to move pages, so this lets go of it meanwhile.
        """
        pending = place.reclaim
        if pending is None:
            return False
        place.lock.release()
        try:
            concurrent.futures.wait([pending], max(0.0, deadline - time.monotonic()))
        finally:
            place.lock.acquire()
        return pending.done()

    def _open(self, directory: int) -> OpenSegment | None:
        try:
            return self._files.open_next(directory)
        except lmdb.Error:
            self._metrics.add("index_write_errors")
            return None
        except OSError as err:
            self._metrics.add(f"segment_errors_{errno.errorcode.get(err.errno or 0, 'unknown').lower()}")
            return None

    def _has_spare(self, directory: int) -> bool:
        layout = self._layout
        rows = [s for s in self._files.table.snapshot() if layout.directory_of(s.number) == directory]
        made = len(rows) < layout.max_segments // len(layout.roots)
        return made or any(s.state == 0 for s in rows)

    def finish(self, extent: Extent, drain: Drain | None = None) -> None:
        """The extent's I/O is over, or will be when ``drain`` is done."""
        place = self._directories[extent.directory]
        with place.lock:
            if drain is not None and not drain.is_done():
                place.draining.append((drain, extent))
                return
            extent.owner.in_flight -= 1
            if extent.owner.is_full and not extent.owner.in_flight:
                self._seal(place, extent.owner)

    def _retire(self, place: _Directory, segment: OpenSegment) -> None:
        segment.is_full = True
        if not segment.in_flight:
            self._seal(place, segment)

    def _seal(self, place: _Directory, segment: OpenSegment) -> None:
        """Seal, or keep for ``collect`` when the index refuses, as it does on a disk that others filled."""
        try:
            self._files.seal(segment)
        except lmdb.Error:
            self._metrics.add("index_write_errors")
            place.unsealed.append(segment)

    def collect(self, directory: int) -> int:
        """Finish extents whose late I/O is over; returns how many still are not."""
        place = self._directories[directory]
        with place.lock:
            again, place.unsealed = place.unsealed, []
            for segment in again:
                self._seal(place, segment)
            late, place.draining = place.draining, []
            for drain, extent in late:
                self.finish(extent, drain)
            return len(place.draining)

    def drains(self) -> list[Drain]:
        """Writes that outlived their call and still run."""
        return [drain for place in self._directories for drain, _ in place.draining]

    def close(self) -> None:
        """Seal what can be sealed. A segment with late I/O keeps its lock until the process ends."""
        self._background.shutdown(wait=False, cancel_futures=True)
        concurrent.futures.wait([p.reclaim for p in self._directories if p.reclaim is not None], CLOSE_WAIT_S)
        for directory, place in enumerate(self._directories):
            with place.lock:
                self.collect(directory)
                if place.current is not None:
                    self._retire(place, place.current)
                    place.current = None
