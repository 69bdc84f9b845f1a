"""One prefetch after another on fakes, worker step by worker step."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline_kit import Bench, fill

from sglang_hicache_ext.consensus import Report
from sglang_hicache_ext.errors import InvariantError
from sglang_hicache_ext.operation import HostLease, PrefetchOperation, PrefetchRequest, State
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.testing.fakes import fake_hashes
from sglang_hicache_ext.testing.faults import FaultPlan, FaultyStore


def ended(bench: Bench, rid: str) -> Any:
    bench.run_until(lambda: not bench.pipeline.has(rid))
    result = bench.pipeline.poll(rid).result
    assert result is not None
    return result


def test_a_whole_hit_is_loaded_and_inserted() -> None:
    bench = Bench()
    fill(bench.store, "a", 10)
    assert bench.submit("r", 12) is None
    result = ended(bench, "r")
    assert (result.state, result.completed_pages, result.hit_pages) == (State.LOADED, 10, 10)
    assert result.outcomes == {Outcome.LOADED: 10, Outcome.ABSENT: 2}
    assert len(bench.tree) == 10
    assert bench.pipeline.budget.held_pages == 0


def test_what_the_tree_already_has_is_freed_at_once() -> None:
    bench = Bench()
    fill(bench.store, "a", 10)
    for rid in ("first", "second"):
        bench.submit(rid, 10)
    first, second = ended(bench, "first"), ended(bench, "second")
    assert sorted((first.matched_pages, second.matched_pages)) == [0, 10]
    assert bench.pool.free_pages == 54


def test_a_miss_allocates_nothing_and_waits_for_nothing() -> None:
    bench = Bench(policy="best_effort")
    allocs: list[int] = []
    alloc = bench.pool.alloc
    bench.pool.alloc = lambda n: (allocs.append(n), alloc(n))[1]  # type: ignore[method-assign]
    for i in range(20):
        bench.submit(f"r{i}", 10)
        assert bench.pipeline.poll(f"r{i}").is_ready
    bench.steps()
    bench.pipeline.pump()
    assert allocs == []


def test_a_hit_below_the_threshold_is_not_loaded() -> None:
    bench = Bench(threshold=4)
    fill(bench.store, "a", 3)
    assert bench.submit("short", 3) is Outcome.BELOW_THRESHOLD
    bench.submit("r", 8)
    result = ended(bench, "r")
    assert (result.state, result.outcomes) == (State.MISSED, {Outcome.BELOW_THRESHOLD: 3, Outcome.ABSENT: 5})


def test_a_hole_hides_what_is_behind_it_and_is_named() -> None:
    bench = Bench()
    fill(bench.store, "a", 10)
    ns = bench.store.namespace(bench.pipeline._shop.ns.fingerprint)
    bench.memory.remove(ns, [bytes.fromhex(fake_hashes("a", 10)[6])])
    bench.submit("r", 10)
    assert ended(bench, "r").outcomes == {Outcome.LOADED: 6, Outcome.ABSENT: 1, Outcome.HOLE: 3}


@pytest.mark.parametrize(("kind", "outcome"), [("bit_flip", Outcome.CORRUPT), ("read_error", Outcome.READ_ERROR)])
def test_a_bad_page_ends_the_prefix(kind: str, outcome: Outcome) -> None:
    plan = FaultPlan(seed=5, **{kind: 0.2})
    bench = Bench(store=lambda inner, clock: FaultyStore(inner, plan, clock))
    fill(bench.memory, "a", 30)
    bench.submit("r", 30)
    result = ended(bench, "r")
    bad = [plan.strikes(1, bytes.fromhex(h), 0.2) for h in fake_hashes("a", 30)]
    assert result.state is State.FAILED
    assert result.completed_pages == bad.index(True)
    assert result.outcomes[Outcome.LOADED] == bad.index(True)
    assert result.outcomes[outcome] >= 1
    assert result.outcomes.total() == 30
    assert len(bench.tree) == bad.index(True)
    assert bench.memory.metrics.snapshot().pages_queried < 30, "it read on behind the bad page"


def test_what_a_peer_cannot_reach_is_not_read_here() -> None:
    bench = Bench()
    fill(bench.store, "a", 30)
    bench.submit("r", 30)
    bench.steps()
    bench.pipeline.pump()
    slot = bench.pipeline._slots[0]
    bench.pipeline._life.advance(slot, Report(hit=30, loaded=0, limit=6))
    bench.steps()
    bench.pipeline.pump()
    assert bench.pipeline.poll("r").result is not None
    assert bench.memory.metrics.snapshot().pages_queried <= 6


def test_a_query_that_fails_counts_as_read_error_and_the_next_one_works() -> None:
    bench = Bench(store=lambda inner, clock: FaultyStore(inner, FaultPlan(dead_after_calls=1), clock))
    fill(bench.memory, "a", 4)
    bench.submit("r", 4)
    assert ended(bench, "r").outcomes == {Outcome.READ_ERROR: 4}
    bench.store.plan = FaultPlan()
    bench.submit("again", 4)
    assert ended(bench, "again").state is State.LOADED


def test_a_hit_shrinks_to_what_fits() -> None:
    bench = Bench(host_pages=12, threshold=2)
    fill(bench.store, "a", 20)
    bench.submit("r", 20)
    result = ended(bench, "r")
    assert result.outcomes == {Outcome.LOADED: 12, Outcome.NO_HOST_PAGES: 8}


def test_a_prefetch_without_host_pages_is_retried_when_pages_are_freed() -> None:
    bench = Bench(host_pages=12, threshold=4, settings={"queue": 4})
    fill(bench.store, "a", 20)
    held = bench.pool.alloc(10)
    assert held is not None
    bench.submit("r", 20)
    bench.steps()
    for _ in range(5):
        bench.pipeline.pump()
        assert not bench.pipeline.poll("r").is_ready
    bench.pool.free(held)
    bench.run_until(lambda: not bench.pipeline.has("r"), pumps=60)
    result = bench.pipeline.poll("r").result
    assert result is not None
    assert result.outcomes == {Outcome.LOADED: 12, Outcome.NO_HOST_PAGES: 8}


def test_more_prefetches_than_slots_wait_their_turn_and_all_end_in_a_reason() -> None:
    bench = Bench(host_pages=64, settings={"slots": 2, "queue": 3})
    fill(bench.store, "a", 10)
    declined = [bench.submit(f"r{i}", 10) for i in range(8)]
    assert declined.count(None) == 5
    assert declined[5:] == [Outcome.RATE_LIMITED] * 3
    for i in range(5):
        assert ended(bench, f"r{i}").outcomes.total() == 10
    assert bench.pipeline.metrics.snapshot().pages_queried == 80


def test_hotter_host_pages_are_not_evicted_for_a_prefetch() -> None:
    bench = Bench(host_pages=10, threshold=2)
    fill(bench.store, "a", 6)
    fill(bench.store, "b", 8)
    bench.submit("a", 6)
    ended(bench, "a")
    bench.submit("b", 8, "b")
    assert bench.tree.match(fake_hashes("a", 6)) == 6  # used after b was submitted
    assert ended(bench, "b").completed_pages == 4
    assert bench.tree.match(fake_hashes("a", 6)) == 6


def test_colder_host_pages_make_room() -> None:
    bench = Bench(host_pages=10, threshold=2)
    fill(bench.store, "a", 6)
    fill(bench.store, "b", 8)
    bench.submit("a", 6)
    ended(bench, "a")
    bench.submit("b", 8, "b")
    assert ended(bench, "b").completed_pages == 8
    assert bench.tree.match(fake_hashes("a", 6)) == 2


def test_best_effort_ends_at_the_first_poll_with_what_is_complete() -> None:
    bench = Bench(policy="best_effort")
    fill(bench.store, "a", 30)
    bench.submit("r", 30)
    while bench.pipeline._slots[0].op.completed_pages == 0:
        bench.steps(3)
        bench.pipeline.pump()
    poll = bench.pipeline.poll("r")
    assert poll.result is not None
    assert poll.result.state is State.STOPPED
    assert poll.result.outcomes[Outcome.LATE] == 30 - poll.result.completed_pages > 0
    bench.run_until(lambda: bench.pipeline.is_idle)
    assert bench.pool.free_pages == 64 - poll.result.completed_pages


def test_stopping_is_not_freeing() -> None:
    bench = Bench(policy="best_effort", store=lambda i, c: FaultyStore(i, FaultPlan(seed=3, late=1.0, late_s=9.0), c))
    fill(bench.memory, "a", 8)
    bench.submit("r", 8)
    bench.run_until(lambda: bench.pipeline.budget.held_pages == 8)
    bench.steps()
    assert bench.pipeline.poll("r").is_ready
    for _ in range(3):
        bench.pipeline.pump()
    assert bench.pipeline.draining_pages == 8
    assert bench.pool.free_pages == 56
    bench.clock.advance(10.0)
    bench.store.settle()  # the late bytes arrive in pages that nobody else owns
    bench.check()
    bench.run_until(lambda: bench.pipeline.is_idle)
    assert bench.pool.free_pages == 64


def test_a_store_that_hangs_is_bounded_named_and_degrades_to_recompute() -> None:
    bench = Bench(policy="wait_complete")
    fill(bench.store, "a", 8)
    bench.submit("r", 8)
    bench.run_until(lambda: bench.pipeline.budget.held_pages == 8)
    bench.latency_s = float("inf")
    bench.steps()
    assert not bench.pipeline.poll("r").is_ready
    bench.clock.advance(31.0)
    bench.pipeline.pump()
    health = bench.pipeline.health()
    assert health["is_degraded"]
    assert health["oldest_inflight_seconds"] >= 31.0
    assert "read of 2 pages for r" in health["oldest_inflight"]
    assert bench.pipeline.poll("r").is_ready
    assert bench.submit("next", 8) is Outcome.LATE
    bench.latency_s = 0.0
    bench.executor.is_released = True
    bench.run_until(lambda: bench.pipeline.is_idle)
    bench.pipeline.pump()
    assert bench.submit("healed", 8) is None
    assert ended(bench, "healed").state is State.LOADED


def test_wait_complete_is_capped() -> None:
    bench = Bench(policy="wait_complete", settings={"stall_limit_s": 1000.0})
    fill(bench.store, "a", 8)
    bench.submit("r", 8)
    bench.latency_s = float("inf")
    bench.steps()
    for _ in range(3):
        bench.pipeline.pump()
        assert not bench.pipeline.poll("r").is_ready
    bench.clock.advance(61.0)
    bench.pipeline.pump()
    result = bench.pipeline.poll("r").result
    assert result is not None
    assert result.outcomes == {Outcome.LATE: 8}


STATES = ["queued", "querying", "hit_known", "waiting_host", "loading", "partly_loaded", "loaded", "stopped", "failed"]


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state_frees_each_host_page_once_and_the_next_prefetch_runs(state: str) -> None:
    slots = 1 if state == "queued" else 8
    plan = FaultPlan(seed=5, read_error=0.2) if state == "failed" else FaultPlan()
    bench = Bench(host_pages=24, settings={"slots": slots}, store=lambda i, c: FaultyStore(i, plan, c))
    fill(bench.memory, "a", 20)
    fill(bench.memory, "b", 20)
    blocker = bench.pool.alloc(24) if state == "waiting_host" else None
    if state == "queued":
        bench.submit("other", 20, "b")
    bench.submit("r", 20)
    bring_to(bench, state)
    bench.pipeline.abort("r")
    assert not bench.pipeline.has("r")
    assert bench.pipeline.poll("r").result is None
    if blocker is not None:
        bench.pool.free(blocker)
    bench.run_until(lambda: bench.pipeline.is_idle)
    assert bench.pipeline.budget.held_pages == 0
    assert bench.pool.free_pages + len(bench.tree) == 24
    bench.store.plan = FaultPlan()
    bench.submit("next", 20, "b")
    assert ended(bench, "next").completed_pages == 20


def bring_to(bench: Bench, state: str) -> None:
    pipeline = bench.pipeline
    op = pipeline._active["r"].op
    if state in ("queued", "querying"):
        return
    bench.steps(40)
    if state == "hit_known":
        return
    if state in ("loaded", "failed"):
        bench.run_until(lambda: not pipeline.has("r"))
        return
    pipeline.pump()
    if state == "waiting_host":
        assert op.state is State.WAITING_HOST
        return
    assert op.state is State.LOADING
    if state == "partly_loaded":
        while not op.completed_pages:
            bench.steps(2)
            pipeline.pump()
        assert op.completed_pages < 20
    if state == "stopped":
        pipeline._guarded(pipeline._life.stop, pipeline._active["r"], pipeline._active["r"].verdict)


def test_a_second_prefetch_of_a_running_request_is_a_bug_of_the_caller() -> None:
    bench = Bench()
    bench.submit("r", 4)
    with pytest.raises(InvariantError):
        bench.submit("r", 4)


def test_a_lease_is_split_and_returned_exactly_once() -> None:
    pool = Bench().pool
    pages = pool.alloc(6)
    assert pages is not None
    lease = HostLease(pages)
    with pytest.raises(InvariantError):
        lease.take_drained()
    assert lease.split(1, 4).tolist() == pages[:1].tolist()
    assert (lease.leased_pages, lease.draining_pages) == (0, 2)
    assert lease.take_drained().tolist() == pages[4:].tolist()
    for again in (lease.take_drained, lambda: lease.split(0, 0)):
        with pytest.raises(InvariantError):
            again()


def test_an_operation_takes_only_legal_transitions_and_ends_once() -> None:
    op = PrefetchOperation(PrefetchRequest("r", 3, list), 0, 0.0)
    with pytest.raises(InvariantError):
        op.move(State.LOADING)
    op.decide(0, [Outcome.LATE, Outcome.LATE])
    with pytest.raises(InvariantError, match="1 pages of 3 undecided"):
        op.finish(State.ABORTED, "aborted", 0, 0.0)
    op = PrefetchOperation(PrefetchRequest("r", 3, list), 0, 0.0)
    op.decide_rest(Outcome.LATE)
    op.finish(State.ABORTED, "aborted", 0, 0.0)
    with pytest.raises(InvariantError):
        op.finish(State.ABORTED, "aborted", 0, 0.0)


def test_a_bug_turns_the_pipeline_off_and_requests_go_on_without_it() -> None:
    bench = Bench()
    fill(bench.store, "a", 8)
    bench.tree.insert_host = None  # type: ignore[assignment, method-assign]
    bench.submit("r", 8)
    for _ in range(30):
        bench.steps(12)
        bench.pipeline.pump()
    assert not bench.pipeline.is_enabled
    assert bench.pipeline.poll("r").is_ready
    assert bench.submit("next", 8) is Outcome.READ_ERROR
