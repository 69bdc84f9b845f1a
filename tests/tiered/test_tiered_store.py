"""Two tiers as one: hits, split reads, background moves, and one of them down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.errors import StoreClosedError
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.tiered import TieredStore
from sglang_hicache_ext.testing import conformance
from sglang_hicache_ext.testing.conformance import CHECKS, Check, StoreUnderTest

MakeTiers = Callable[..., TieredStore]


def spread(store: TieredStore, p: Any, near: list[int], far: list[int]) -> Any:
    """Put pages of ``p`` on the tiers directly."""
    ns = store.namespace(p.fingerprint)
    for tier, rows in ((store.near, near), (store.far, far)):
        tier.write(ns, [p.keys[r] for r in rows], p.source_regions.take(rows))
    return ns


def test_a_write_is_on_the_near_tier_at_once_and_on_the_far_one_after_a_flush(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(40)
    ns = store.namespace(p.fingerprint)
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    assert store.near.contains(ns, p.keys).all()
    assert store.flush(10.0)
    assert store.far.contains(ns, p.keys).all()
    assert store.stats().counters["tier_sent_pages"] == 40


def test_the_caller_does_not_wait_for_a_slow_far_tier(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(4)
    release = threading.Event()
    store.far.on_write = lambda: release.wait(30)  # type: ignore[attr-defined]
    ns = store.namespace(p.fingerprint)
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    assert not store.flush(0.05), "the far tier is still writing"
    release.set()
    assert store.flush(10.0)


def test_policy_none_sends_nothing_and_hot_sends_what_was_read_again(tiers: MakeTiers, pages: Any) -> None:
    for policy, sent in (("none", 0), ("hot", 3)):
        store, p = tiers(remote_write_policy=policy), pages(8)
        ns = store.namespace(p.fingerprint)
        store.write(ns, p.keys, p.source_regions)
        store.flush(10.0)
        assert not store.far.contains(ns, p.keys).any()
        store.read(ns, p.keys[:3], p.target_regions.slice(0, 3))
        store.flush(10.0)
        assert store.far.contains(ns, p.keys).sum() == sent


def test_the_longest_run_is_what_both_tiers_together_can_serve(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(1300)
    ns = spread(store, p, [*range(600), *range(900, 1300)], [*range(600, 900)])
    assert store.hit_pages(ns, p.keys, 5.0) == 1300
    store.far.remove(ns, [p.keys[700]])
    assert store.hit_pages(ns, p.keys) == 700
    store.near.remove(ns, [p.keys[0]])
    assert store.hit_pages(ns, p.keys) == 0


def test_the_far_tier_is_not_asked_for_what_is_near(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(64)
    ns = spread(store, p, [*range(64)], [])
    assert store.hit_pages(ns, p.keys) == 64 and store.contains(ns, p.keys).all()
    assert store.far.asked == []  # type: ignore[attr-defined]


def test_a_read_takes_each_page_from_the_nearest_tier_and_both_at_once(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(near_admission="none", remote_write_policy="none"), pages(32)
    ns = spread(store, p, [*range(0, 32, 2)], [*range(1, 32)])
    both = threading.Barrier(2)
    store.near.on_read = store.far.on_read = lambda: both.wait(10)  # type: ignore[attr-defined]
    result = store.read(ns, p.keys, p.target_regions)
    assert set(result.outcomes) == {Outcome.LOADED} and (p.target == p.data).all()
    assert (store.near.reads, store.far.reads) == ([16], [16])  # type: ignore[attr-defined]
    counters = store.stats().counters
    assert counters["tier_near_pages"] == counters["tier_far_pages"] == 16


def test_a_page_that_proves_bad_near_is_taken_from_far(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(6)
    ns = spread(store, p, [*range(6)], [*range(6)])
    store.near._pages[(ns.id, p.keys[2])].payload[7] ^= 1  # type: ignore[attr-defined]
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    assert (p.target == p.data).all()


def test_a_page_that_proves_bad_near_and_is_not_far_stays_corrupt(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(3)
    ns = spread(store, p, [*range(3)], [])
    store.near._pages[(ns.id, p.keys[1])].payload[7] ^= 1  # type: ignore[attr-defined]
    outcomes = store.read(ns, p.keys, p.target_regions).outcomes
    assert outcomes == (Outcome.LOADED, Outcome.CORRUPT, Outcome.LOADED)


def test_pages_read_from_far_are_kept_near_and_read_there_next_time(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(20)
    ns = spread(store, p, [], [*range(20)])
    store.read(ns, p.keys, p.target_regions)
    assert store.flush(10.0) and store.near.contains(ns, p.keys).all()
    p.target[:] = 0
    store.read(ns, p.keys, p.target_regions)
    assert (p.target == p.data).all() and store.far.reads == [20]  # type: ignore[attr-defined]


def test_a_full_near_tier_keeps_remote_pages_only_from_their_second_read_on(tiers: MakeTiers, pages: Any) -> None:
    store, p, old = tiers(near_capacity="64KiB"), pages(4), pages(15, seed=3)
    ns = spread(store, p, [], [*range(4)])
    store.near.write(ns, old.keys, old.source_regions)  # 15 of 16 pages: above the share
    store.read(ns, p.keys, p.target_regions)
    assert store.flush(10.0) and not store.near.contains(ns, p.keys).any()
    store.read(ns, p.keys[:2], p.target_regions.slice(0, 2))
    assert store.flush(10.0) and store.near.contains(ns, p.keys).tolist() == [True, True, False, False]


def test_the_near_tier_down_is_slower_not_wrong(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(8)
    ns = spread(store, p, [*range(4)], [*range(8)])
    store.near.is_down = True  # type: ignore[attr-defined]
    assert store.hit_pages(ns, p.keys) == 8
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    assert (p.target == p.data).all()
    more = pages(4, seed=2)
    assert set(store.write(ns, more.keys, more.source_regions).outcomes) == {WriteOutcome.STORED}
    assert store.far.contains(ns, more.keys).all()


def test_the_far_tier_down_leaves_what_is_near(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(8)
    ns = spread(store, p, [*range(5)], [*range(8)])
    store.far.is_down = True  # type: ignore[attr-defined]
    assert store.hit_pages(ns, p.keys) == 5
    outcomes = store.read(ns, p.keys, p.target_regions).outcomes
    assert outcomes == (Outcome.LOADED,) * 5 + (Outcome.READ_ERROR,) * 3
    more = pages(4, seed=2)
    assert set(store.write(ns, more.keys, more.source_regions).outcomes) == {WriteOutcome.STORED}
    assert store.flush(10.0)
    assert store.stats().counters["tier_failures"] >= 2
    store.far.is_down = False  # type: ignore[attr-defined]
    store.read(ns, more.keys, pages(4).target_regions)  # read again: gets its next chance
    assert store.flush(10.0) and store.far.contains(ns, more.keys).all()


def test_pages_the_near_tier_refuses_go_far_at_once(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(4)
    store.near.refuses = True  # type: ignore[attr-defined]
    ns = store.namespace(p.fingerprint)
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    assert store.far.contains(ns, p.keys).all()


def test_the_queue_is_bounded_and_what_does_not_fit_is_counted(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(remote_queue_pages=10), pages(64)
    release, started = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        release.wait(30)

    store.far.on_write = block  # type: ignore[attr-defined]
    ns = store.namespace(p.fingerprint)
    store.write(ns, p.keys[:8], p.source(0, 8))
    assert started.wait(10)
    for start in range(8, 64, 8):
        store.write(ns, p.keys[start : start + 8], p.source(start, start + 8))
    release.set()
    assert store.flush(10.0)
    counters = store.stats().counters
    assert counters["tier_sent_pages"] + counters["tier_send_dropped_pages"] == 64
    assert counters["tier_send_dropped_pages"] == 48 and store.near.contains(ns, p.keys).all()


def test_a_removed_page_does_not_come_back_from_the_queue(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(16)
    started, release = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        release.wait(30)

    store.far.on_write = block  # type: ignore[attr-defined]
    ns = store.namespace(p.fingerprint)
    store.write(ns, p.keys[:8], p.source(0, 8))
    assert started.wait(10)
    store.write(ns, p.keys[8:], p.source(8, 16))
    threading.Timer(0.05, release.set).start()
    assert store.remove(ns, p.keys[4:12]) == 8
    assert store.flush(10.0)
    assert store.contains(ns, p.keys).tolist() == [True] * 4 + [False] * 8 + [True] * 4


def test_a_move_asked_for_during_a_removal_does_not_bring_the_page_back(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(remote_write_policy="none"), pages(4)
    ns = store.namespace(p.fingerprint)
    store.write(ns, p.keys, p.source_regions)
    started, release = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        release.wait(30)

    def send_now() -> None:  # as a reader would that found the page just before it went
        store._mover.send(ns, p.keys, 4096)
        started.wait(0.3)

    store.far.on_write, store.near.on_remove = block, send_now  # type: ignore[attr-defined]
    assert store.remove(ns, p.keys) == 4
    release.set()
    assert store.flush(10.0) and not store.contains(ns, p.keys).any()


def test_random_use_is_never_wrong_with_tiers_that_come_and_go(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(near_capacity="128KiB"), pages(64)
    ns, rng = store.namespace(p.fingerprint), np.random.default_rng(11)
    for _ in range(300):
        rows = sorted(rng.choice(64, 8, replace=False).tolist())
        keys = [p.keys[r] for r in rows]
        store.near.is_down, store.far.is_down = (rng.random(2) < 0.15).tolist()  # type: ignore[attr-defined]
        if rng.random() < 0.4:
            store.write(ns, keys, p.source_regions.take(rows))
        else:
            p.target[:] = 0
            outcomes = store.read(ns, keys, p.target_regions.take(rows)).outcomes
            for row, outcome in zip(rows, outcomes, strict=True):
                assert outcome is not Outcome.LOADED or (p.target[row] == p.data[row]).all()


def test_an_error_of_a_tier_does_not_end_the_background_moves(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(8)

    def fail() -> None:
        raise RuntimeError("a bug in a tier")

    store.far.on_write = fail  # type: ignore[attr-defined]
    ns = store.namespace(p.fingerprint)
    store.write(ns, p.keys[:4], p.source(0, 4))
    assert store.flush(10.0)
    store.far.on_write = lambda: None  # type: ignore[attr-defined]
    store.write(ns, p.keys[4:], p.source(4, 8))
    assert store.flush(10.0)
    assert store.far.contains(ns, p.keys).tolist() == [False] * 4 + [True] * 4


def test_calls_after_close_say_so(tiers: MakeTiers, pages: Any) -> None:
    store, p = tiers(), pages(1)
    ns = store.namespace(p.fingerprint)
    store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.read(ns, p.keys, p.target_regions)
    with pytest.raises(StoreClosedError):
        store.near.contains(ns, p.keys)


NEEDS_ONE_TIER = {conformance.the_capacity_holds_at_every_instant}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["all", "hot", "none"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_tiered_store_keeps_the_promise(check: Check, policy: str, tiers: MakeTiers) -> None:
    if check in NEEDS_ONE_TIER and policy != "none":
        return  # what the near tier reclaims, the far one still has
    check(StoreUnderTest(lambda: tiers(remote_write_policy=policy), operations=2000))
