"""What a write call and its batches are, and how their tables get on disk."""

from __future__ import annotations

import errno
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import WriteOutcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import Drain
from sglang_hicache_ext.storage_backends.engines.base import PENDING, TIMED_OUT, IoPlan
from sglang_hicache_ext.storage_backends.nvme.codes import UNDECIDED, WRITE_CODE, join_drains
from sglang_hicache_ext.storage_backends.nvme.lanes import Lane
from sglang_hicache_ext.storage_backends.nvme.space import Extent
from sglang_hicache_ext.storage_backends.record import ENTRY, Table, encode_table, table_bytes

STORED, PRESENT, FULL = (WRITE_CODE[o] for o in (WriteOutcome.STORED, WriteOutcome.PRESENT, WriteOutcome.FULL))
WRITE_ERROR, LATE = (WRITE_CODE[o] for o in (WriteOutcome.WRITE_ERROR, WriteOutcome.LATE))
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class WriteCall:
    """One call's pages; ``codes`` is filled in as they end."""

    ns_id: bytes
    number: int
    keys: Sequence[bytes]
    regions: Regions
    deadline: float
    codes: NDArray[np.int8]
    digests: list[bytes] = field(default_factory=list)
    drains: list[tuple[list[int], Drain]] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """The extents one lane writes: where each page goes, and the drain that keeps the extents taken."""

    lane: Lane
    extents: list[Extent]
    rows: NDArray[np.int64]
    segments: NDArray[np.int64]
    blocks: NDArray[np.int64]
    drain: Drain | None = None
    tables: Tables | None = None


@dataclass(frozen=True, slots=True)
class Tables:
    """The encoded tables of a batch's extents, one behind the other in ``memory``."""

    memory: mmap.mmap
    iov: NDArray[np.uint64]
    pages: int


def encode_tables(call: WriteCall, batch: Batch) -> Tables:
    """Head every extent; pages that failed are left out, an extent without pages still says where the next is."""
    total = sum(table_bytes(len(e.rows)) for e in batch.extents)
    memory = mmap.mmap(-1, total)
    view = memoryview(memory)
    base = int(np.frombuffer(memory, np.uint8).ctypes.data)
    at, position, iov = 0, 0, []
    for extent in batch.extents:
        size = table_bytes(len(extent.rows))
        blocks = batch.blocks[position : position + len(extent.rows)]
        _fill_table(call, extent, blocks, view[at : at + size])
        iov.append((base + at, size))
        at, position = at + size, position + len(extent.rows)
    return Tables(memory, np.asarray(iov, np.uint64), int((call.codes[batch.rows] == UNDECIDED).sum()))


def write_tables(call: WriteCall, batch: Batch, handles: dict[int, int], metrics: Metrics) -> None:
    """Write the batch's tables; encodes them unless that was done while its pages were on their way, and all went well."""
    tables = batch.tables
    if tables is None or tables.pages != int((call.codes[batch.rows] == UNDECIDED).sum()):
        tables = encode_tables(call, batch)
    n = len(batch.extents)
    plan = IoPlan(
        np.asarray([handles[e.owner.segment.number] for e in batch.extents], np.int32),
        np.asarray([e.offset for e in batch.extents], np.int64),
        np.arange(n + 1, dtype=np.int32),
        tables.iov,
        tables.memory,
    )
    result = batch.lane.engine.write(plan, max(0.0, call.deadline - time.monotonic()))
    if result.drain is not None:
        batch.drain = join_drains([batch.drain, result.drain])
    for extent, value, size in zip(batch.extents, result.res.tolist(), plan.op_bytes.tolist(), strict=True):
        if value != size:
            open_rows = extent.rows[call.codes[extent.rows] == UNDECIDED]
            late = value in (PENDING, TIMED_OUT)
            call.codes[open_rows] = LATE if late else FULL if -value in FULL_ERRORS else WRITE_ERROR
            metrics.add("table_write_errors")


def _fill_table(call: WriteCall, extent: Extent, blocks: NDArray[np.int64], out: memoryview) -> None:
    good = np.flatnonzero(call.codes[extent.rows] == UNDECIDED)
    entries = np.zeros(len(good), ENTRY)
    rows = extent.rows[good].tolist()
    entries["key"] = np.frombuffer(b"".join(call.keys[r] for r in rows), "V32")
    entries["digest"] = np.frombuffer(b"".join(call.digests[r] for r in rows), "V16")
    entries["block"] = blocks[good]
    entries["nbytes"] = call.regions.page_bytes
    table = Table(call.ns_id, extent.offset, extent.nbytes, entries)
    encode_table(extent.owner.identity, table, out)
