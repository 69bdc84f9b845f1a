"""The device planner computes exactly what the host planner computes, in buffers of a fixed size."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_hicache_ext.kernels.l2_prefetch.planner import distance_for, item_bound, split_counts
from sglang_hicache_ext.kernels.l2_prefetch.schedule import alloc_schedule, fill_schedule, single_split
from sglang_hicache_ext.kernels.l2_prefetch.tuning import load_table

TILE = load_table().tile("*", 4, 128, "bf16")


@pytest.mark.parametrize("sms", [1, 7, 76, 78, 132, 148])
@pytest.mark.parametrize("by_lens", [False, True])
def test_device_and_host_plan_alike(sms: int, by_lens: bool) -> None:
    rng = random.Random(sms)
    for kv_heads, batch, window in ((1, 1, 0), (8, 5, 0), (4, 7, 1000)):
        lengths = [rng.choice((0, 1, rng.randint(2, 300), rng.randint(300, 200_000))) for _ in range(batch)]
        seen = [min(n, window) if window else n for n in lengths]
        room = alloc_schedule(16, kv_heads, sms, "cpu")
        schedule = room.prefix(batch, item_bound(batch, kv_heads, sms))
        indptr = torch.tensor([0, *lengths]).cumsum(0).int()
        source = {"seq_lens": torch.tensor(lengths, dtype=torch.int32)} if by_lens else {"indptr": indptr}
        fill_schedule(schedule, kv_heads=kv_heads, sms=sms, tile=TILE, distance=3, window=window, **source)
        counts = split_counts(seen, kv_heads, sms, TILE.block_tokens)
        ends = [0]
        for c in counts:
            ends.append(ends[-1] + c)
        assert schedule.split_indptr.tolist() == ends
        want = [b for b, c in enumerate(counts) for _ in range(c)]
        assert schedule.item_request.tolist() == want + [-1] * (schedule.items - len(want))
        assert int(schedule.distance) == distance_for(seen, kv_heads, sms, TILE, 3)
        assert room.item_request[schedule.items :].eq(-1).all() and not room.split_indptr[batch + 1 :].any()


def test_an_empty_batch_launches_nothing() -> None:
    fill_schedule(
        alloc_schedule(4, 1, 4, "cpu").prefix(0, 0), kv_heads=1, sms=4, tile=TILE, distance=1, indptr=torch.zeros(1)
    )


def test_the_single_split_schedule_names_each_request_once() -> None:
    schedule = single_split(3, "cpu")
    assert schedule.split_indptr.tolist() == [0, 1, 2, 3] and schedule.item_request.tolist() == [0, 1, 2]
    assert int(schedule.distance) == 0


@pytest.mark.parametrize(("tokens", "distance"), [(1, 0), (4 * 32, 0), (4 * 32 + 1, 2)])
def test_the_distance_is_zero_up_to_twice_the_loops_depth(tokens: int, distance: int) -> None:
    assert (TILE.block_tokens, TILE.depth) == (32, 2)
    schedule = alloc_schedule(1, 1, 4, "cpu")
    lens = torch.tensor([tokens], dtype=torch.int32)
    fill_schedule(schedule, kv_heads=1, sms=4, tile=TILE, distance=2, seq_lens=lens)
    assert int(schedule.distance) == distance == distance_for([tokens], 1, 4, TILE, 2)
