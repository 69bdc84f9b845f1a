"""Segment files: their rows in the index, who owns which, and the open segment a writer appends to.

Life of a segment: (new) -> OPEN -> SEALED -> FREE -> OPEN ... An owner keeps an exclusive lock on the file of its open
segment; the kernel drops it when the owner dies, and a successor seals the segment. Reclaim takes the same lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import lmdb
import numpy as np
import xxhash

from sglang_hicache_ext.keys import NAMESPACE_BYTES
from sglang_hicache_ext.page import ALIGN
from sglang_hicache_ext.storage_backends.nvme.index import Index, next_sequence
from sglang_hicache_ext.storage_backends.nvme.layout import Layout, sync_directory, try_lock
from sglang_hicache_ext.storage_backends.nvme.prealloc import preallocate
from sglang_hicache_ext.storage_backends.record import ENTRY, SegmentIdentity, Table, encode_table, table_bytes

_ROW = struct.Struct("<B3xIQQI")
_NUMBER = struct.Struct(">I")
_HEADER = struct.Struct("<8sI4x16sIIQQ16s")
_HEADER_MAGIC = b"HXsegmnt"
_HEADER_VERSION = 1


class State(IntEnum):
    FREE = 0
    OPEN = 1
    SEALED = 2


_STATES = tuple(State)
"""A member by its value: rows are read by the thousand."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One row of the ``segments`` table. ``live`` counts index entries that point into it."""

    number: int
    state: State
    generation: int
    nonce: int
    sequence: int
    live: int = 0

    def identity(self, store_id: bytes) -> SegmentIdentity:
        return SegmentIdentity(store_id, self.number, self.generation, self.nonce)


def encode_header(store_id: bytes, segment: Segment) -> bytes:
    """The first ALIGN bytes of a segment file."""
    head = _HEADER.pack(
        _HEADER_MAGIC, _HEADER_VERSION, store_id, segment.number, segment.generation, segment.nonce,
        segment.sequence, bytes(16),
    )[:-16]  # fmt: skip
    return (head + xxhash.xxh3_128_digest(head)).ljust(ALIGN, b"\0")


def decode_header(raw: bytes, store_id: bytes, number: int) -> Segment | None:
    """The segment as its file tells it, or None: not ours, another version, damaged."""
    if len(raw) < _HEADER.size:
        return None
    magic, version, store, found, generation, nonce, sequence, check = _HEADER.unpack_from(raw)
    if (magic, version, store, found) != (_HEADER_MAGIC, _HEADER_VERSION, store_id, number):
        return None
    if xxhash.xxh3_128_digest(raw[: _HEADER.size - 16]) != check:
        return None
    return Segment(number, State.SEALED, generation, nonce, sequence)


class SegmentTable:
    """The ``segments`` table. Every method that takes a transaction runs inside the caller's."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._table = index.table(b"segments")

    def get(self, txn: Any, number: int) -> Segment | None:
        raw = txn.get(_NUMBER.pack(number), db=self._table)
        return _segment(number, raw) if raw is not None else None

    def put(self, txn: Any, segment: Segment) -> None:
        row = _ROW.pack(segment.state, segment.generation, segment.nonce, segment.sequence, segment.live)
        txn.put(_NUMBER.pack(segment.number), row, db=self._table)

    def delete(self, txn: Any, number: int) -> None:
        txn.delete(_NUMBER.pack(number), db=self._table)

    def all(self, txn: Any) -> list[Segment]:
        return [_segment(_NUMBER.unpack(k)[0], v) for k, v in txn.cursor(self._table)]

    def snapshot(self) -> list[Segment]:
        with self._index.read() as txn:
            return self.all(txn)

    def add_live(self, txn: Any, number: int, delta: int) -> None:
        """Count entries put in or taken out; a sealed segment without any is free at once."""
        segment = self.get(txn, number)
        if segment is None:
            return
        live = max(0, segment.live + delta)
        state = State.FREE if segment.state is State.SEALED and not live else segment.state
        self.put(txn, replace(segment, live=live, state=state))


def _segment(number: int, raw: bytes) -> Segment:
    if len(raw) != _ROW.size:
        raise lmdb.CorruptedError("segment row of another length")
    state, generation, nonce, sequence, live = _ROW.unpack(raw)
    if state >= len(_STATES):
        raise lmdb.CorruptedError(f"segment row of state {state}")
    return Segment(number, _STATES[state], generation, nonce, sequence, live)


class OpenSegment:
    """A segment this store appends to. Not thread-safe: guarded by its directory's lock.

    Attributes:
        in_flight: extents handed out and not yet finished; it is sealed only at zero.
    """

    def __init__(self, segment: Segment, lock_fd: int, store_id: bytes, segment_bytes: int) -> None:
        self.segment = segment
        self.lock_fd = lock_fd
        self.identity = segment.identity(store_id)
        self.end = ALIGN
        self.in_flight = 0
        self.is_full = False
        self._bytes = segment_bytes

    def fits(self, stride: int, kept: int = 0) -> int:
        """Pages of ``stride`` bytes that one more batch could hold, leaving ``kept`` bytes of the segment alone."""
        room = self._bytes - self.end - kept
        pages = max(0, room // stride)
        while pages and table_bytes(pages) + pages * stride > room:
            pages -= 1
        return pages

    def take(self, pages: int, stride: int) -> tuple[int, int]:
        """Hand out an extent: (offset, bytes)."""
        offset, nbytes = self.end, table_bytes(pages) + pages * stride
        self.end += nbytes
        self.in_flight += 1
        return offset, nbytes


class SegmentFiles:
    """Creates, reuses, seals and frees segment files; the exact capacity check is here.

    Thread-safe through the index's write transactions.
    """

    def __init__(self, layout: Layout, index: Index, *, device_durable: bool, point: Callable[[str], None]) -> None:
        self.layout, self.index = layout, index
        self.table = SegmentTable(index)
        self.preallocation = "fallocate"
        self._device_durable = device_durable
        self._point = point

    def open_next(self, directory: int) -> OpenSegment | None:
        """A free or new segment of ``directory``, locked and with its header on disk; None when there is none.

        Raises OSError when the file system refuses (ENOSPC included); nothing is left behind then.
        """
        reserved = self._reserve(directory)
        if reserved is None:
            return None
        segment, fd, is_new = reserved
        try:
            self._point("segment_reserved")
            if is_new:
                self.preallocation = preallocate(fd, self.layout.segment_bytes)
            os.pwrite(fd, encode_header(self.layout.store_id, segment), 0)
            if self._device_durable:
                os.fdatasync(fd)
                sync_directory(self.layout.segment_dir(directory))
            self._point("segment_header")
        except BaseException:
            self._undo(segment, fd, is_new)
            raise
        return OpenSegment(segment, fd, self.layout.store_id, self.layout.segment_bytes)

    def _reserve(self, directory: int) -> tuple[Segment, int, bool] | None:
        """Pick and lock a segment inside one write transaction, so that processes never overshoot together."""
        with contextlib.ExitStack() as undo:  # also when the commit fails
            with self.index.write() as txn:
                reserved = self._pick(txn, directory)
                if reserved is not None:
                    undo.callback(os.close, reserved[1])
            undo.pop_all()
            return reserved

    def _pick(self, txn: Any, directory: int) -> tuple[Segment, int, bool] | None:
        mine = [s for s in self.table.all(txn) if self.layout.directory_of(s.number) == directory]
        for old in sorted((s for s in mine if s.state is State.FREE), key=lambda s: s.sequence):
            fd = self.lock(old.number)
            if fd is not None:
                return self._put_to_use(txn, old), fd, False
        taken = {s.number for s in mine}
        fresh = range(directory, self.layout.max_segments, len(self.layout.roots))
        number = next((n for n in fresh if n not in taken), None)
        if number is None:
            return None
        path = self.layout.segment_path(number)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not try_lock(fd):
            os.close(fd)
            raise OSError(errno.EBUSY, "a new segment file is locked", str(path))
        return self._put_to_use(txn, Segment(number, State.FREE, 0, 0, 0)), fd, True

    def _put_to_use(self, txn: Any, old: Segment) -> Segment:
        sequence = next_sequence(txn, self.index.table(b"meta"))
        generation = (old.generation + 1) & 0xFFFFFFFF
        segment = Segment(old.number, State.OPEN, generation, secrets.randbits(64), sequence)
        self.table.put(txn, segment)
        return segment

    def _undo(self, segment: Segment, fd: int, is_new: bool) -> None:
        with contextlib.suppress(lmdb.Error), self.index.write() as txn:
            if is_new:
                self.layout.segment_path(segment.number).unlink(missing_ok=True)
                self.table.delete(txn, segment.number)
            else:
                self.table.put(txn, replace(segment, state=State.FREE))
        os.close(fd)

    def lock(self, number: int) -> int | None:
        """Lock a segment's file; None when somebody has it or it is gone. Closing the descriptor gives it up."""
        try:
            fd = os.open(self.layout.segment_path(number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        if try_lock(fd):
            return fd
        os.close(fd)
        return None

    def seal(self, opened: OpenSegment) -> None:
        """End writing to a segment and give up its lock. A last table says that nothing follows."""
        room = self.layout.segment_bytes - opened.end
        if room >= ALIGN:
            end = bytearray(table_bytes(0))
            nothing = Table(bytes(NAMESPACE_BYTES), opened.end, room, np.zeros(0, ENTRY))
            encode_table(opened.identity, nothing, memoryview(end))
            with contextlib.suppress(OSError):  # without it reclaim only scans a little more
                os.pwrite(opened.lock_fd, end, opened.end)
        with self.index.write() as txn:
            row = self.table.get(txn, opened.segment.number)
            if row is not None and row.generation == opened.segment.generation:
                self.table.put(txn, replace(row, state=State.SEALED if row.live else State.FREE))
        os.close(opened.lock_fd)
        self._point("segment_sealed")

    def seal_dead(self) -> int:
        """Seal the open segments whose owner died; returns how many."""
        with self.index.read() as txn:
            if not any(s.state is State.OPEN for s in self.table.all(txn)):
                return 0
        sealed = 0
        with self.index.write() as txn:
            for row in self.table.all(txn):
                fd = self.lock(row.number) if row.state is State.OPEN else None
                if fd is None:
                    continue
                self.table.put(txn, replace(row, state=State.SEALED if row.live else State.FREE))
                os.close(fd)
                sealed += 1
        return sealed
