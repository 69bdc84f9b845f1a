"""From pages to operations: neighbours on disk become one vectored operation, up to a cap."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.page import ALIGN, Regions, align_up
from sglang_hicache_ext.storage_backends.engines.base import IoPlan

MERGE_BYTES = 256 << 10
"""Small neighbours are joined up to this: large enough for bandwidth, small enough to keep the queue deep."""
MAX_PIECES = 1024
"""IOV_MAX of Linux."""

_pad = mmap.mmap(-1, 2 * ALIGN)
_PAD_VIEW = np.frombuffer(_pad, np.uint8)
ZERO_PAD = int(_PAD_VIEW.ctypes.data)
"""What a page that is no multiple of ALIGN is filled up with on disk; only ever read."""
SINK_PAD = ZERO_PAD + ALIGN
"""Where such filling goes when it is read back; never looked at."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Operations over pages in the order given. Operation i moves pages [first[i], first[i + 1])."""

    plan: IoPlan
    first: NDArray[np.int64]


def plan_pages(
    handles: NDArray[np.int32],
    segments: NDArray[np.int64],
    blocks: NDArray[np.int64],
    regions: Regions,
    *,
    pad: int,
    owner: Any = None,
) -> PagePlan:
    """Plan the transfer of pages sorted by (segment, block).

    Args:
        handles: [pages] engine handle of each page's file.
        segments, blocks: [pages] where each page starts, blocks of ALIGN bytes.
        regions: [pages] host memory, aligned for direct I/O.
        pad: address of ALIGN bytes used for the filling behind each page.
    """
    n, page_bytes = len(regions), regions.page_bytes
    stride = align_up(page_bytes)
    columns = len(regions.sizes)
    filling = stride - page_bytes
    iov = np.empty((n, columns + bool(filling), 2), np.uint64)
    iov[:, :columns, 0] = regions.addrs
    iov[:, :columns, 1] = regions.sizes.astype(np.uint64)
    if filling:
        iov[:, columns, 0], iov[:, columns, 1] = pad, filling
    first = _operation_starts(segments, blocks, stride, max(1, min(MERGE_BYTES // stride, MAX_PIECES // iov.shape[1])))
    heads = first[:-1]
    starts = (first * iov.shape[1]).astype(np.int32)
    plan = IoPlan(handles[heads], blocks[heads] * ALIGN, starts, iov.reshape(-1, 2), owner)
    return PagePlan(plan, first)


def _operation_starts(
    segments: NDArray[np.int64], blocks: NDArray[np.int64], stride: int, cap: int
) -> NDArray[np.int64]:
    n = len(segments)
    if cap == 1 or n <= 1:
        return np.arange(n + 1, dtype=np.int64)
    breaks = (segments[1:] != segments[:-1]) | (blocks[1:] != blocks[:-1] + stride // ALIGN)
    run_start = np.flatnonzero(np.concatenate(([True], breaks)))
    run_of = np.cumsum(np.concatenate(([0], breaks)))
    in_run = np.arange(n) - run_start[run_of]
    return np.append(np.flatnonzero(in_run % cap == 0), n).astype(np.int64)


def pages_of(ops: NDArray[np.int64], first: NDArray[np.int64]) -> list[int]:
    """Positions of the pages that operations ``ops`` move."""
    if len(first) and first[-1] == len(first) - 1:
        pages: list[int] = ops.tolist()
        return pages
    spans = zip(first[ops].tolist(), first[ops + 1].tolist(), strict=True)
    return [page for start, stop in spans for page in range(start, stop)]
