"""Array work on I/O plans: order, neighbours, what is left of a short transfer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines.base import IoPlan


def distinct_files(plan: IoPlan) -> list[int]:
    """The file handles of a plan, each once."""
    if len(plan) and bool((plan.files == plan.files[0]).all()):
        return [int(plan.files[0])]
    return [int(handle) for handle in np.unique(plan.files)]


def in_file_order(plan: IoPlan) -> tuple[NDArray[np.int64], IoPlan]:
    """Sort operations by file and offset: (positions in the given plan, the sorted plan)."""
    order = np.lexsort((plan.offsets, plan.files)).astype(np.int64)
    if len(order) < 2 or bool((np.diff(order) > 0).all()):
        return order, plan
    return order, take(plan, order)


def take(plan: IoPlan, order: NDArray[np.int64]) -> IoPlan:
    """The operations ``order`` of ``plan``, in that order."""
    counts = (plan.iov_start[1:] - plan.iov_start[:-1])[order]
    starts = np.zeros(len(order) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = np.repeat(plan.iov_start[:-1][order] - starts[:-1], counts) + np.arange(int(starts[-1]))
    return IoPlan(plan.files[order], plan.offsets[order], starts, plan.iov[rows], plan.owner)


def merged_runs(
    plan: IoPlan, op_bytes: NDArray[np.int64], first: int, last: int, max_pieces: int, max_bytes: int
) -> list[tuple[int, int]]:
    """Cut the sorted operations [first, last) into runs that are adjacent on disk, each within the caps."""
    runs: list[tuple[int, int]] = []
    begin, run_bytes = first, 0
    adjacent = (plan.files[1:] == plan.files[:-1]) & (plan.offsets[:-1] + op_bytes[:-1] == plan.offsets[1:])
    for i in range(first, last):
        pieces = int(plan.iov_start[i + 1] - plan.iov_start[begin])
        fits = pieces <= max_pieces and run_bytes + int(op_bytes[i]) <= max_bytes
        if i > begin and not (fits and bool(adjacent[i - 1])):
            runs.append((begin, i))
            begin, run_bytes = i, 0
        run_bytes += int(op_bytes[i])
    if begin < last:
        runs.append((begin, last))
    return runs


def rest_of(iov: NDArray[np.uint64], done: int) -> NDArray[np.uint64]:
    """Rows of ``iov`` still to move after its first ``done`` bytes did. The given rows are not changed."""
    ends = np.cumsum(iov[:, 1].astype(np.int64))
    piece = int(np.searchsorted(ends, done, side="right"))
    rest = iov[piece:].copy()
    if len(rest):
        into = done - (int(ends[piece - 1]) if piece else 0)
        rest[0, 0] += np.uint64(into)
        rest[0, 1] -= np.uint64(into)
    return rest
