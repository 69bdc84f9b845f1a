"""The parts of the simulator against small, exact answers."""

from __future__ import annotations

import random

import pytest
from simulator.cache import LruPages
from simulator.link import SharedLink
from simulator.loads import MultiTurn, SharedPrompt
from simulator.loop import EventLoop


def ends(sends: list[tuple[float, float]], capacity: float, cap: float = 0.0) -> list[float]:
    loop = EventLoop()
    link, done = SharedLink(loop, capacity, cap), {}
    for i, (at, nbytes) in enumerate(sends):
        loop.at(at, link.send, nbytes, lambda i=i: done.update({i: loop.now}))
    loop.run()
    return [done[i] for i in range(len(sends))]


def test_two_transfers_share_a_link_equally() -> None:
    assert ends([(0, 100), (0, 100)], 100) == pytest.approx([2.0, 2.0])


def test_a_late_transfer_slows_the_one_under_way() -> None:
    # 50 alone in 0.5 s, then both at 50/s: the first ends at 1.5; the second then has 50 left at full speed.
    assert ends([(0, 100), (0.5, 100)], 100) == pytest.approx([1.5, 2.0])


def test_one_transfer_does_not_pass_its_cap() -> None:
    assert ends([(0, 100)], 1000, cap=10) == pytest.approx([10.0])


def test_a_shared_link_matches_stepwise_integration() -> None:
    rng = random.Random(5)
    sends = [(rng.uniform(0, 5), rng.uniform(1, 300)) for _ in range(25)]
    left, done, now, step = [b for _, b in sends], [0.0] * 25, 0.0, 1e-3
    while not all(done):
        active = [i for i in range(25) if sends[i][0] <= now and not done[i]]
        for i in active:
            left[i] -= 100 / len(active) * step
            if left[i] <= 0:
                done[i] = now + step
        now += step
    assert ends(sends, 100) == pytest.approx(done, abs=0.1)


def test_a_change_of_capacity_counts_from_then_on() -> None:
    loop, done = EventLoop(), []
    link = SharedLink(loop, 100)
    loop.at(0, link.send, 100, lambda: done.append(loop.now))
    loop.at(0.5, link.set_capacity, 25)
    loop.run()
    assert done == pytest.approx([2.5])


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pages = LruPages(4)
    pages.add([1, 2, 3])
    pages.add([7, 8])
    assert [p in pages for p in (1, 2, 3, 7, 8)] == [True, True, False, True, True]
    assert pages.prefix([1, 2, 3]) == 2


def test_reserved_room_is_taken_from_the_oldest_and_given_back() -> None:
    pages = LruPages(4, [1, 2, 3, 4])
    assert pages.reserve(10) == 4
    assert len(pages) == 0
    pages.release(4)
    pages.add([1, 2])
    assert len(pages) == 2


@pytest.mark.parametrize("make", [MultiTurn, SharedPrompt])
def test_a_generator_repeats_itself_for_one_seed_only(make: type[MultiTurn] | type[SharedPrompt]) -> None:
    assert make(seed=3).load().requests == make(seed=3).load().requests
    assert make(seed=3).load().requests != make(seed=4).load().requests
    times = [r.arrival_s for r in make(seed=3).load().requests]
    assert times == sorted(times)
