"""Moving pages that proved useful out of a segment that is being reclaimed."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.page import Regions, align_up
from sglang_hicache_ext.ports import Clock, Drain
from sglang_hicache_ext.storage_backends.nvme.bounce import BouncePool, Slot
from sglang_hicache_ext.storage_backends.nvme.codes import UNDECIDED, join_drains
from sglang_hicache_ext.storage_backends.nvme.index import PAGE
from sglang_hicache_ext.storage_backends.nvme.reader import LOADED, ReadCall, Reader
from sglang_hicache_ext.storage_backends.nvme.space import Space
from sglang_hicache_ext.storage_backends.nvme.writer import Writer
from sglang_hicache_ext.storage_backends.nvme.writes import WriteCall


class Mover:
    """Reads pages (verified) and appends them to the open segment of the same directory, as far as it has room."""

    def __init__(self, reader: Reader, bounce: BouncePool, clock: Clock, deadline_s: float) -> None:
        self._reader, self._bounce, self._clock, self._deadline_s = reader, bounce, clock, deadline_s

    def connect(self, space: Space, writer: Writer) -> None:
        """Reclaim is part of making space, and moving needs space: joined after all are made."""
        self._space, self._writer = space, writer

    def move(
        self, directory: int, ns_id: bytes, number: int, keys: list[bytes], old: NDArray[np.void]
    ) -> NDArray[np.void]:
        """[keys] PAGE: the new place of each page, ``nbytes`` 0 where it could not move."""
        places = np.zeros(len(keys), PAGE)
        nbytes = int(old["nbytes"][0])
        wave = self._bounce.pages_per_slot(align_up(nbytes))
        for start in range(0, len(keys), wave):
            deadline = time.monotonic() + self._deadline_s
            slot = self._bounce.take(align_up(nbytes), deadline)
            if slot is None:
                break
            late: list[Drain | None] = []
            try:
                part = keys[start : start + wave]
                moved = self._move_wave(directory, ns_id, number, part, nbytes, slot, deadline, late)
                places[start : start + wave] = moved
            finally:
                self._bounce.give(slot, join_drains(late))
        return places

    def _move_wave(
        self, directory: int, ns_id: bytes, number: int, keys: list[bytes], nbytes: int, slot: Slot, deadline: float,
        late: list[Drain | None],
    ) -> NDArray[np.void]:  # fmt: skip
        """``late`` gets the I/O on the slot that outlives this."""
        regions = Regions(slot.rows(len(keys), align_up(nbytes)).addrs, np.asarray([nbytes], np.int64), slot)
        reading = ReadCall(ns_id, number, keys, regions, deadline, np.full(len(keys), UNDECIDED, np.int8), [])
        try:
            self._reader.read(reading)
        finally:
            late += [drain for _, drain in reading.drains]
        good = np.flatnonzero(reading.codes == LOADED)
        places = np.zeros(len(keys), PAGE)
        extents = self._space.take_rest(directory, np.arange(len(good)), align_up(nbytes))
        if not extents:
            return places
        part = good[: len(extents[0].rows)]
        writing = WriteCall(
            ns_id, number, [keys[i] for i in part.tolist()], regions.take(part), deadline,
            np.full(len(part), UNDECIDED, np.int8),
        )  # fmt: skip
        try:
            places[part] = self._writer.append(writing, extents)
        finally:
            for extent in extents:
                late.append(extent.drain)
                self._space.finish(extent, extent.drain)
        return places
