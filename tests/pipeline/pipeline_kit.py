"""One rank of the pipeline on fakes, driven by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_hicache_ext.budget import BudgetSettings
from sglang_hicache_ext.executor import ThreadExecutor
from sglang_hicache_ext.keys import Fingerprint, key_bytes
from sglang_hicache_ext.operation import PrefetchRequest
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.pipeline import Pipeline
from sglang_hicache_ext.pipeline_settings import PipelineSettings
from sglang_hicache_ext.policy import PolicySettings, make_policy
from sglang_hicache_ext.ports import PageStore
from sglang_hicache_ext.scheduling import BatchSizes
from sglang_hicache_ext.storage_backends.memory import MemoryStore
from sglang_hicache_ext.testing.clock import ManualClock, SkewedClock
from sglang_hicache_ext.testing.fakes import FakeHostPool, FakeRadixIndex, fake_hashes, stamped_pages
from sglang_hicache_ext.testing.sim import StepExecutor

PAGE_BYTES = 64
PRINT = Fingerprint("kit", page_tokens=1)


def fill(store: PageStore, name: str, pages: int) -> None:
    """Store the first ``pages`` pages of the prompt ``name``."""
    hashes = fake_hashes(name, pages)
    written = store.write(
        store.namespace(PRINT), [key_bytes(h) for h in hashes], regions_of_array(stamped_pages(hashes, PAGE_BYTES))
    )
    assert all(o.is_stored for o in written.outcomes)


@dataclass
class Bench:
    """A pipeline whose workers move one step at a time."""

    policy: str = "wait_complete"
    host_pages: int = 64
    threshold: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    store: Any = None
    numbers: PolicySettings = field(default_factory=lambda: PolicySettings(page_tokens=1, wait_complete_cap_s=60.0))

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        own = SkewedClock(self.clock, 0.0)
        self.pool = FakeHostPool(self.host_pages, PAGE_BYTES)
        self.tree = FakeRadixIndex(self.pool, own)
        self.memory = MemoryStore(clock=self.clock)
        self.store = self.memory if self.store is None else self.store(self.memory, self.clock)
        self.latency_s = 0.0
        self.executor = StepExecutor(random.Random(1), self.clock, lambda: self.latency_s)
        budget = BudgetSettings(page_tokens=1, threshold_tokens=self.threshold, host_share=1.0)
        options = {"batches": BatchSizes(2, 4), "stall_limit_s": 30.0, **self.settings}
        self.pipeline = Pipeline(
            self.store,
            self.store.namespace(PRINT),
            self.pool,
            self.tree,
            make_policy(self.policy, self.numbers),
            PipelineSettings(budget, **options),
            clock=own,
            executor=self.executor,
        )

    def submit(self, rid: str, pages: int, name: str = "a") -> Outcome | None:
        return self.pipeline.submit(PrefetchRequest(rid, pages, lambda: fake_hashes(name, pages)))

    def steps(self, count: int = 200) -> None:
        for _ in range(count):
            self.executor.step()

    def run_until(self, is_done: Callable[[], bool], pumps: int = 200) -> None:
        for _ in range(pumps):
            if is_done():
                return
            self.steps(12)
            self.pipeline.pump()
            self.check()
        raise AssertionError(f"not done after {pumps} pumps: {self.pipeline.health()}")

    def check(self) -> None:
        self.pool.check()
        owned = self.pool.free_pages + self.pipeline.budget.held_pages + len(self.tree)
        assert owned == self.pool.total_pages


def wait_for(is_done: Callable[[], bool], act: Callable[[], None], timeout_s: float = 20.0) -> None:
    """Call ``act`` until ``is_done``; for tests with real threads, with a deadline of its own."""
    end = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < end, "not done in time"
        act()


def threads() -> ThreadExecutor:
    return ThreadExecutor(idle_s=0.01)
