"""The pipeline with real threads: ranks, hangs, and a bounded end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from pipeline_kit import PAGE_BYTES, PRINT, fill, threads, wait_for

from sglang_hicache_ext.budget import BudgetSettings
from sglang_hicache_ext.operation import PrefetchRequest
from sglang_hicache_ext.pipeline import Pipeline
from sglang_hicache_ext.pipeline_settings import PipelineSettings
from sglang_hicache_ext.policy import make_policy
from sglang_hicache_ext.ports import ReadResult
from sglang_hicache_ext.scheduling import BatchSizes
from sglang_hicache_ext.storage_backends.memory import MemoryStore
from sglang_hicache_ext.testing.fakes import FakeHostPool, FakeRadixIndex, ThreadGroup, fake_hashes
from sglang_hicache_ext.testing.faults import FaultPlan, FaultyStore
from sglang_hicache_ext.trace import Trace


class StuckStore(FaultyStore):
    """Reads hang until they are let go."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, FaultPlan())
        self.entered, self.go = threading.Event(), threading.Event()

    def read(self, *args: Any, **kwargs: Any) -> ReadResult:
        self.entered.set()
        assert self.go.wait(30)
        return super().read(*args, **kwargs)


def make(store: Any, host_pages: int = 256, **options: Any) -> tuple[Pipeline, FakeHostPool, FakeRadixIndex]:
    from sglang_hicache_ext.ports import SystemClock

    pool = FakeHostPool(host_pages, PAGE_BYTES)
    tree = FakeRadixIndex(pool, SystemClock())
    settings = PipelineSettings(BudgetSettings(page_tokens=1, threshold_tokens=1, host_share=1.0), BatchSizes(2, 8))
    pipeline = Pipeline(
        store,
        store.namespace(PRINT),
        pool,
        tree,
        make_policy("wait_complete"),
        settings,
        executor=threads(),
        **options,
    )
    return pipeline, pool, tree


def submit(pipeline: Pipeline, rid: str, pages: int, name: str) -> None:
    assert pipeline.submit(PrefetchRequest(rid, pages, lambda: fake_hashes(name, pages))) is None


def test_many_requests_at_once_with_threads_load_every_page() -> None:
    store, trace = MemoryStore(), Trace()
    pipeline, pool, tree = make(store, trace=trace)
    for i in range(12):
        fill(store, f"p{i}", 20)
        submit(pipeline, f"r{i}", 20, f"p{i}")
    wait_for(lambda: pipeline.is_idle, pipeline.pump)
    results = [pipeline.poll(f"r{i}").result for i in range(12)]
    assert [r.completed_pages for r in results if r is not None] == [20] * 12
    assert pool.free_pages + len(tree) == 256 and len(tree) == 240
    assert {s["cat"] for s in trace.spans} == {"query", "io", "insert"}
    assert pipeline.close() == []


def test_close_is_bounded_names_the_stuck_read_and_withholds_its_pages() -> None:
    memory = MemoryStore()
    fill(memory, "a", 8)
    store = StuckStore(memory)
    pipeline, pool, _ = make(store)
    submit(pipeline, "r", 8, "a")
    wait_for(store.entered.is_set, pipeline.pump)
    began = time.monotonic()
    stuck = pipeline.close(0.3)
    assert time.monotonic() - began < 5
    assert any("read of 2 pages for r" in s for s in stuck)
    assert pool.free_pages == 248
    ((pages, drain),) = pipeline.withheld()
    assert (len(pages), drain.is_done()) == (8, False)
    assert pipeline.close(0.3) == stuck
    store.go.set()
    wait_for(drain.is_done, lambda: None)
    pool.check()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_different_stores_and_faults_end_alike_with_equal_collectives(ranks: int) -> None:
    group = ThreadGroup(ranks)
    found: list[Any] = [None] * ranks
    failed: list[BaseException] = []

    def rank(index: int) -> None:
        try:
            memory = MemoryStore()
            fill(memory, "a", 40 - 7 * index)
            fill(memory, "b", 30)
            store = FaultyStore(memory, FaultPlan(seed=index, read_error=0.05 * index))
            pipeline, pool, tree = make(store, sync=group.rank(index))
            submit(pipeline, "ra", 40, "a")
            submit(pipeline, "rb", 30, "b")
            for _ in range(2000):
                pipeline.pump()
                if pipeline.is_idle:
                    break
            pipeline.pump()  # the one collective after the last prefetch
            results = [pipeline.poll(r).result for r in ("ra", "rb")]
            found[index] = [(r.state, r.completed_pages, r.hit_pages) for r in results if r is not None]
            assert pool.free_pages + len(tree) == 256
            assert pipeline.close() == []
        except BaseException as e:
            failed.append(e)

    workers = [threading.Thread(target=rank, args=(i,)) for i in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not failed, failed
    assert all(f == found[0] and len(f) == 2 for f in found)
    assert found[0][0][2] == 40 - 7 * (ranks - 1)
    assert len(set(group.calls)) == 1 and group.calls[0] > 0
