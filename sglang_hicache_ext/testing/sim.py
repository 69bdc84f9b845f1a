"""The whole pipeline on fakes, one seeded step at a time, over several simulated ranks.

Every piece of a worker's work is a step; which one runs next comes from the seed. Owners make the same calls in the
same order, with any number of worker steps between them, and meet at every pump. After every step the
books must balance. ``run_seed(n)`` replays a seed exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.budget import BudgetSettings
from sglang_hicache_ext.executor import Body
from sglang_hicache_ext.keys import Fingerprint, key_bytes
from sglang_hicache_ext.operation import TERMINAL, PrefetchRequest, PrefetchResult
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.pipeline import Pipeline
from sglang_hicache_ext.pipeline_settings import PipelineSettings
from sglang_hicache_ext.policy import PolicyName, PolicySettings, make_policy
from sglang_hicache_ext.ports import PageStore
from sglang_hicache_ext.scheduling import BatchSizes
from sglang_hicache_ext.testing.clock import ManualClock, SkewedClock
from sglang_hicache_ext.testing.fakes import FakeHostPool, FakeRadixIndex, fake_hashes, stamped_pages
from sglang_hicache_ext.testing.faults import FaultPlan, FaultyStore

T = TypeVar("T")
PAGE_BYTES = 64
HANG = float("inf")


class StepExecutor:
    """Runs bodies one step at a time. A call may take time before and after it takes effect, or hang."""

    def __init__(self, rng: random.Random, clock: ManualClock, latency_s: Callable[[], float]) -> None:
        self._rng, self._clock, self._latency_s = rng, clock, latency_s
        self._bodies: list[Iterator[bool]] = []
        self._names: list[str] = []
        self._in_call = 0
        self.is_released = False

    def add(self, name: str, body: Body) -> None:
        self._names.append(name)
        self._bodies.append(body())

    def wake(self) -> None:
        """Every step looks for work by itself."""

    def call(self, fn: Callable[..., T], *args: Any) -> Generator[bool, None, T]:
        self._in_call += 1
        yield from self._pass_time()
        try:
            result = fn(*args)
            yield from self._pass_time()
        finally:
            self._in_call -= 1
        return result

    def _pass_time(self) -> Iterator[bool]:
        due = self._clock.now() + self._latency_s()
        while self._clock.now() < due and not self.is_released:
            yield False

    def step(self) -> bool:
        """Run one step of one body; True when it did something."""
        return next(self._rng.choice(self._bodies))

    @property
    def is_quiet(self) -> bool:
        """True when no call is under way."""
        return not self._in_call

    def stop(self, timeout_s: float) -> list[str]:
        self._bodies = []
        return [] if self.is_quiet else self._names


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    ranks: int
    policy: PolicyName
    host_pages: int
    faults: FaultPlan
    call_s: float
    hang: float
    actions: int

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(seed)
        trouble = rng.choice([0.0, 0.0, 0.05, 0.2])
        faults = FaultPlan(
            seed=seed,
            call_error=trouble * rng.random(),
            read_error=trouble * rng.random(),
            bit_flip=trouble * rng.random(),
            late=trouble * rng.random(),
            lost=trouble * rng.random(),
            late_s=rng.choice([0.05, 1.0]),
            dead_after_calls=rng.choice([0, 0, 0, 8]),
        )
        return cls(
            seed=seed,
            ranks=rng.choice([1, 1, 2, 3]),
            policy=rng.choice(list(PolicyName)),
            host_pages=rng.choice([24, 64, 160]),
            faults=faults,
            call_s=rng.choice([0.0, 0.01, 0.2]),
            hang=rng.choice([0.0, 0.0, 0.03]),
            actions=rng.choice([15, 30, 45]),
        )


@dataclass(slots=True, eq=False)
class Rank:
    """One simulated rank and everything it owns."""

    pool: FakeHostPool
    tree: FakeRadixIndex
    store: FaultyStore
    executor: StepExecutor
    pipeline: Pipeline
    collectives: int = 0
    ended: list[PrefetchResult] = field(default_factory=list)
    pages_asked: int = 0

    def check(self) -> None:
        """The books of this rank. Raises AssertionError."""
        self.pool.check()
        held = self.pipeline.budget.held_pages
        owned = self.pool.free_pages + held + len(self.tree)
        assert owned == self.pool.total_pages, f"free + held + tree = {owned}, the pool has {self.pool.total_pages}"
        leases = [s.op.lease for s in self.pipeline._slots if s.op.lease is not None]
        in_leases = sum(lease.leased_pages + lease.draining_pages for lease in leases)
        assert in_leases == held, f"leased + draining = {in_leases}, the budget says {held}"


class Simulation:
    """Drives one scenario to its end. Raises AssertionError with the seed in its message."""

    def __init__(self, scenario: Scenario, store_of: Callable[[ManualClock], PageStore]) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed ^ 0x5EED)
        self.clock = ManualClock()
        self.ranks = [self._make_rank(r, store_of) for r in range(scenario.ranks)]
        self.live: dict[str, int] = {}
        self.submitted = 0

    def _make_rank(self, rank: int, store_of: Callable[[ManualClock], PageStore]) -> Rank:
        sc, rng = self.scenario, self.rng
        clock = SkewedClock(self.clock, rng.uniform(-5, 5))
        pool = FakeHostPool(sc.host_pages, PAGE_BYTES)
        tree = FakeRadixIndex(pool, clock)
        faults = sc.faults if rng.random() < 0.7 else FaultPlan()
        store = FaultyStore(store_of(self.clock), faults, self.clock, sleep=lambda _: None)
        ns = store.namespace(Fingerprint("sim", page_tokens=1))
        for name, pages in (("a", 40), ("b", 20), ("c", 12)):
            hashes = fake_hashes(name, rng.randint(pages // 2, pages))
            store.inner.write(ns, [key_bytes(h) for h in hashes], regions_of_array(stamped_pages(hashes, PAGE_BYTES)))
        executor = StepExecutor(rng, self.clock, self._latency_s)
        policy = make_policy(sc.policy, PolicySettings(page_tokens=1, timeout_base_s=0.5, wait_complete_cap_s=5))
        settings = PipelineSettings(
            BudgetSettings(page_tokens=1, threshold_tokens=threshold_of(sc.seed), host_share=0.8),
            BatchSizes(2, 8),
            slots=4,
            queue=2,
            stall_limit_s=3.0,
            prefill_tokens_per_s=40.0,
        )
        pipeline = Pipeline(store, ns, pool, tree, policy, settings, clock=clock, executor=executor)
        return Rank(pool, tree, store, executor, pipeline)

    def _latency_s(self) -> float:
        if self.scenario.hang and self.rng.random() < self.scenario.hang:
            return HANG
        return self.rng.random() * self.scenario.call_s

    # -- steps ------------------------------------------------------------------------------------------------------

    def settle_some(self) -> None:
        """Any number of worker steps, late completions and moments pass."""
        for _ in range(self.rng.choice([0, 1, 3, 8])):
            rank = self.rng.choice(self.ranks)
            rank.executor.step()
            if self.rng.random() < 0.1:
                rank.store.settle()
            rank.check()
        if self.rng.random() < 0.3:
            self.clock.advance(self.rng.choice([0.001, 0.05, 0.4]))

    def everywhere(self, act: Callable[[Rank], T]) -> T:
        """Make the same call on every rank; all must answer alike."""
        answers = []
        for rank in self.ranks:
            answers.append(act(rank))
            rank.check()
            self.settle_some()
        assert all(a == answers[0] for a in answers), f"ranks disagree: {answers}"
        return answers[0]

    def pump(self) -> None:
        """One pump of every rank, with its collective. Unequal numbers of collectives fail."""
        waiting: list[tuple[Rank, Generator[NDArray[np.int64], NDArray[np.int64], None], NDArray[np.int64]]] = []
        for rank in self.ranks:
            steps = rank.pipeline.pump_steps()
            vector = next(steps, None)
            if vector is not None:
                rank.collectives += 1
                waiting.append((rank, steps, vector))
            self.settle_some()
        assert len(waiting) in (0, len(self.ranks)), "a rank stayed away from a collective"
        if waiting:
            agreed = np.min([v for _, _, v in waiting], axis=0)
            for rank, steps, _ in waiting:
                assert next_or_end(steps, agreed), "a pump made a second collective"
                rank.check()
                self.settle_some()
        for rank in self.ranks:
            assert rank.pipeline.is_enabled, "the pipeline met a bug and turned itself off"
        assert len({r.pool.free_pages for r in self.ranks}) == 1, "host pools of the ranks differ"

    def submit(self) -> None:
        name = self.rng.choice("abc")
        pages = self.rng.randint(1, 40)
        rid = f"r{self.submitted}"
        self.submitted += 1
        hashes = fake_hashes(name, pages)
        declined = self.everywhere(lambda r: r.pipeline.submit(PrefetchRequest(rid, pages, lambda: hashes)))
        for rank in self.ranks:
            rank.pages_asked += pages
        if declined is None:
            self.live[rid] = pages

    def poll(self, rid: str) -> bool:
        answers: list[PrefetchResult] = []

        def ask(rank: Rank) -> tuple[Any, ...]:
            poll = rank.pipeline.poll(rid)
            result = poll.result
            if poll.is_ready:
                assert result is not None, f"{rid} was ready without a result"
                rank.ended.append(result)
                answers.append(result)
            return (poll.is_ready,) if result is None else (result.state, result.completed_pages, result.matched_pages)

        self.everywhere(ask)
        for result in answers:
            assert result.state in TERMINAL
            assert result.outcomes.total() == self.live[rid], f"{rid}: {result.outcomes} of {self.live[rid]} pages"
            assert result.outcomes["loaded"] == result.completed_pages  # type: ignore[index]
        if answers:
            del self.live[rid]
        return bool(answers)

    def abort(self, rid: str) -> None:
        self.everywhere(lambda r: r.pipeline.abort(rid))
        del self.live[rid]

    def act(self) -> None:
        choice = self.rng.random()
        if choice < 0.25:
            self.submit()
        elif choice < 0.5 and self.live:
            self.poll(self.rng.choice(list(self.live)))
        elif choice < 0.57 and self.live:
            self.abort(self.rng.choice(list(self.live)))
        elif choice < 0.6:
            self.everywhere(lambda r: r.tree.evict(3))
        else:
            self.pump()

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            for _ in range(self.scenario.actions):
                self.act()
                self.settle_some()
            self.finish()
        except AssertionError as e:
            raise AssertionError(f"--sim-seed={self.scenario.seed}: {e} [{self.scenario}]") from e

    def finish(self) -> None:
        """Every request ends within a bound even while calls hang; then nothing is held and the books are closed."""
        self._until(lambda: not self.live, "requests still wait", self._poll_all)
        for rank in self.ranks:
            rank.executor.is_released = True
            rank.store.let_lost_complete()
        self._until(
            lambda: all(r.pipeline.is_idle and r.executor.is_quiet for r in self.ranks),
            "host pages still drain",
            lambda: None,
        )
        for rank in self.ranks:
            assert rank.pipeline.budget.held_pages == 0
            snapshot = rank.pipeline.metrics.snapshot()
            assert snapshot.pages_queried == rank.pages_asked, f"{snapshot.outcomes} for {rank.pages_asked} pages"
            assert rank.pipeline.close(0.0) == []
        assert len({r.collectives for r in self.ranks}) == 1, "unequal numbers of collectives"

    def _poll_all(self) -> None:
        for rid in list(self.live):
            self.poll(rid)

    def _until(self, is_done: Callable[[], bool], what: str, act: Callable[[], None]) -> None:
        for _ in range(400):
            if is_done():
                return
            self.pump()
            act()
            for rank in self.ranks:
                rank.store.settle()
                for _ in range(12):
                    rank.executor.step()
                rank.check()
            self.clock.advance(0.1)
        raise AssertionError(f"no progress: {what}: {[r.pipeline.health() for r in self.ranks]}")


def threshold_of(seed: int) -> int:
    return random.Random(seed ^ 0xBEEF).choice([1, 3, 6])


def next_or_end(steps: Generator[NDArray[np.int64], NDArray[np.int64], None], agreed: NDArray[np.int64]) -> bool:
    """Send the agreement; True when the pump ends with it."""
    try:
        steps.send(agreed.copy())
    except StopIteration:
        return True
    return False


def run_seed(seed: int, store_of: Callable[[ManualClock], PageStore]) -> None:
    """Play one seed. ``store_of`` makes an empty store, normally the memory store."""
    Simulation(Scenario.of(seed), store_of).run()
