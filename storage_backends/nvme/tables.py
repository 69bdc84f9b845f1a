"""Walking the batch tables of a segment file: for reclaim, which asks what a segment holds, and for rebuild."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from sglang_hicache_ext.page import ALIGN
from sglang_hicache_ext.storage_backends.record import (
    TABLE_MAGIC,
    SegmentIdentity,
    Table,
    decode_table,
    table_bytes,
    table_pages,
)

_FIRST_READ = 3 * ALIGN
"""Holds the table of 128 pages, the usual batch."""
_SCAN_BYTES = 1 << 20
_MAGIC = np.frombuffer(TABLE_MAGIC, "<u8")[0]


def walk(fd: int, seg: SegmentIdentity, segment_bytes: int) -> Iterator[Table]:
    """Yield the tables of one life of a segment, reading no payload.

    Where the chain is broken (a batch that was never finished, damage) it goes on at the next block that starts a
    table of this very life of the segment.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    offset = ALIGN
    while offset < segment_bytes:
        table = _read_table(fd, seg, offset, segment_bytes)
        if table is None:
            offset = _next_table(fd, seg, offset + ALIGN, segment_bytes)
            continue
        yield table
        offset += table.extent_bytes


def _read_table(fd: int, seg: SegmentIdentity, offset: int, segment_bytes: int) -> Table | None:
    raw = os.pread(fd, _FIRST_READ, offset)
    pages = table_pages(seg, raw, offset, segment_bytes)
    if pages < 0:
        return None
    if table_bytes(pages) > len(raw):
        raw = os.pread(fd, table_bytes(pages), offset)
    return decode_table(seg, raw, offset, segment_bytes)


def _next_table(fd: int, seg: SegmentIdentity, offset: int, segment_bytes: int) -> int:
    """Offset of the next block that looks like a table of ``seg``; ``segment_bytes`` when there is none."""
    while offset < segment_bytes:
        try:
            offset = os.lseek(fd, offset, os.SEEK_DATA) // ALIGN * ALIGN  # space never written needs no reading
        except OSError:
            return segment_bytes
        raw = os.pread(fd, min(_SCAN_BYTES, segment_bytes - offset), offset)
        blocks = len(raw) // ALIGN
        if not blocks:
            return segment_bytes
        heads = np.frombuffer(raw, "<u8", blocks * ALIGN // 8).reshape(blocks, ALIGN // 8)[:, 0]
        for block in np.flatnonzero(heads == _MAGIC).tolist():
            at = offset + block * ALIGN
            if table_pages(seg, raw[block * ALIGN : (block + 1) * ALIGN], at, segment_bytes) >= 0:
                return int(at)
        offset += blocks * ALIGN
    return segment_bytes
