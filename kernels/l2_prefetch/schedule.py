# mypy: disable-error-code="untyped-decorator"
"""Work items on the device: which request each CTA row serves, and the prefetch distance.

``fill_schedule`` computes on the device what ``planner.split_counts`` computes on the host, so that a CUDA
graph with a fixed grid adapts to every batch. Nothing here synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_hicache_ext.kernels.l2_prefetch.planner import MIN_SPLIT_TOKENS, WAVES, Plan, item_bound, min_tiles
from sglang_hicache_ext.kernels.l2_prefetch.tuning import Tile


@dataclass(frozen=True, slots=True)
class Schedule:
    """Device tensors read by the kernels; a prefix of a larger buffer works too.

    Attributes:
        batch: requests.
        split_indptr: [batch + 1] int32, first work item of each request.
        item_request: [items] int32, request of each work item, -1 beyond the last.
        distance: [1] int32, tiles ahead; 0 is off.
    """

    batch: int
    split_indptr: torch.Tensor
    item_request: torch.Tensor
    distance: torch.Tensor

    @property
    def items(self) -> int:
        """Rows of the grid: used items and the -1 behind them."""
        return int(self.item_request.shape[0])

    def prefix(self, batch: int, items: int) -> Schedule:
        """The same buffers for a smaller batch."""
        return Schedule(batch, self.split_indptr[: batch + 1], self.item_request[:items], self.distance)


def schedule_from_counts(counts: Sequence[int], distance: int, device: torch.device | str) -> Schedule:
    """A schedule from the planner's counts (each at least 1)."""
    split_indptr, item_request = [0], []
    for b, n in enumerate(counts):
        split_indptr.append(split_indptr[-1] + n)
        item_request += [b] * n
    as_int32: Any = {"dtype": torch.int32, "device": device}
    return Schedule(
        len(counts),
        torch.tensor(split_indptr, **as_int32),
        torch.tensor(item_request, **as_int32),
        torch.tensor([distance], **as_int32),
    )


def schedule_from_plan(plan: Plan, device: torch.device | str) -> Schedule:
    """The schedule of a host-side plan."""
    return schedule_from_counts(plan.splits, plan.prefetch.distance, device)


def single_split(batch: int, device: torch.device | str) -> Schedule:
    """One split per request, no prefetch, built without a copy from the host."""
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Schedule(batch, rows, rows[:batch], torch.zeros(1, dtype=torch.int32, device=device))


def alloc_schedule(max_batch: int, kv_heads: int, sms: int, device: torch.device | str) -> Schedule:
    """Buffers for any batch up to ``max_batch``; fill before use."""
    items = item_bound(max_batch, kv_heads, sms)
    return Schedule(
        max_batch,
        torch.zeros(max_batch + 1, dtype=torch.int32, device=device),
        torch.full((items,), -1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )


@triton.jit
def _fill(  # type: ignore[no-untyped-def]
    indptr, seq_lens, split_indptr, item_request, distance_at, batch, items, kv_heads, ctas, max_distance, min_tiles,
    N: tl.constexpr, WINDOW: tl.constexpr, MIN_TOKENS: tl.constexpr, LENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program b writes request b's items; the last one also the tail and the distance. Each sums all lengths."""
    b = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    mask = rows < batch
    if LENS:
        lengths = tl.load(seq_lens + rows, mask=mask, other=0).to(tl.int64)
    else:
        lengths = (tl.load(indptr + rows + 1, mask=mask, other=0) - tl.load(indptr + rows, mask=mask, other=0)).to(
            tl.int64
        )
    lengths = tl.maximum(lengths, 0)
    if WINDOW > 0:
        lengths = tl.minimum(lengths, WINDOW)
    even = tl.cdiv(tl.sum(lengths, 0) * kv_heads, ctas)
    each = tl.cdiv(tl.maximum(even, MIN_TOKENS), N) * N
    counts = tl.where(mask, tl.maximum(tl.cdiv(lengths, each), 1), 0)
    first = tl.sum(tl.where(rows < b, counts, 0), 0).to(tl.int32)
    mine = tl.sum(tl.where(rows == b, counts, 0), 0).to(tl.int32)
    tl.store(split_indptr + b, first)
    step = tl.arange(0, 128)
    for i in range(0, mine, 128):
        tl.store(item_request + first + i + step, step * 0 + b, mask=i + step < mine)
    if b == batch - 1:
        used = first + mine
        tl.store(split_indptr + batch, used)
        for i in range(used, items, 128):
            tl.store(item_request + i + step, step * 0 - 1, mask=i + step < items)
        longest = tl.minimum(tl.max(lengths, 0), each)
        tl.store(distance_at, tl.where(tl.cdiv(longest, N) > min_tiles, max_distance, 0))


def fill_schedule(
    schedule: Schedule,
    *,
    kv_heads: int,
    sms: int,
    tile: Tile,
    distance: int,
    window: int = 0,
    indptr: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
) -> None:
    """Plan on the device, in one launch, without a synchronisation; recordable in a CUDA graph.

    Args:
        schedule: written in place; its ``items`` must be ``item_bound(batch, kv_heads, sms)`` or more.
        tile: gives the tile and the fewest tiles that prefetch needs.
        distance: what to write when splits are long enough, else 0 is written.
        indptr: [batch + 1] int32 token offsets; or
        seq_lens: [batch] int lengths.
    """
    if schedule.batch == 0:
        return
    source = seq_lens if seq_lens is not None else indptr
    _fill[(schedule.batch,)](
        source,
        source,
        schedule.split_indptr,
        schedule.item_request,
        schedule.distance,
        schedule.batch,
        schedule.items,
        kv_heads,
        WAVES * max(1, sms),
        distance,
        min_tiles(tile),
        N=tile.block_tokens,
        WINDOW=window,
        MIN_TOKENS=MIN_SPLIT_TOKENS,
        LENS=seq_lens is not None,
        ROWS=max(16, triton.next_power_of_2(schedule.batch)),
    )
