"""The write path: batches, pressure, holes, and host pages that are released only after the last I/O."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pipeline_kit import PAGE_BYTES, PRINT

from sglang_hicache_ext.backup import Backup, BackupSettings
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import key_bytes
from sglang_hicache_ext.outcome import WriteOutcome
from sglang_hicache_ext.ports import WriteResult
from sglang_hicache_ext.storage_backends.memory import MemoryStore
from sglang_hicache_ext.testing.clock import ManualClock
from sglang_hicache_ext.testing.fakes import FakeHostPool, fake_hashes, stamped_pages
from sglang_hicache_ext.testing.faults import FaultPlan, FaultyStore
from sglang_hicache_ext.testing.sim import StepExecutor


class Desk:
    def __init__(self, store: Any = None, **settings: Any) -> None:
        self.clock = ManualClock()
        self.memory = MemoryStore(clock=self.clock)
        self.store = self.memory if store is None else store(self.memory, self.clock)
        self.pool = FakeHostPool(64, PAGE_BYTES)
        self.executor = StepExecutor(random.Random(1), self.clock, lambda: 0.0)
        self.ns = self.store.namespace(PRINT)
        self.backup = Backup(
            self.store, self.ns, self.pool, BackupSettings(**settings), clock=self.clock, executor=self.executor
        )
        self.released: list[str] = []

    def submit(self, name: str, pages: int) -> bool:
        hashes = fake_hashes(name, pages)
        held = self.pool.alloc(pages)
        assert held is not None
        self.pool.memory[held] = stamped_pages(hashes, PAGE_BYTES)

        def release() -> None:
            self.pool.free(held)
            self.released.append(name)

        return self.backup.submit(hashes, held, release)

    def work(self, steps: int = 50) -> None:
        for _ in range(steps):
            self.executor.step()
        self.backup.pump()

    def stored(self, name: str, pages: int) -> int:
        return int(self.memory.contains(self.ns, [key_bytes(h) for h in fake_hashes(name, pages)]).sum())

    @property
    def writes(self) -> dict[str, int]:
        return dict(self.backup.metrics.snapshot().writes)


def test_pages_are_written_in_batches_and_then_released() -> None:
    desk = Desk(batch_pages=4)
    assert desk.submit("a", 10)
    assert desk.pool.free_pages == 54
    desk.work()
    assert (desk.stored("a", 10), desk.released, desk.pool.free_pages) == (10, ["a"], 64)
    assert desk.writes == {"stored": 10}


def test_what_is_there_is_not_written_again() -> None:
    desk = Desk()
    desk.submit("a", 4)
    desk.work()
    desk.submit("a", 6)
    desk.work()
    assert desk.writes == {"stored": 6, "present": 4}


def test_under_pressure_pages_are_dropped_counted_and_remembered() -> None:
    desk = Desk(queue_pages=8)
    assert desk.submit("a", 6)
    assert not desk.submit("b", 4)
    assert desk.released == ["b"]
    assert desk.backup.metrics.snapshot().counters["backup_dropped_pages"] == 4
    desk.work()
    assert desk.backup.holes_in(fake_hashes("b", 6)) == [0, 1, 2, 3]
    assert desk.submit("b", 4)
    desk.work()
    assert desk.backup.holes_in(fake_hashes("b", 6)) == []
    assert desk.stored("b", 4) == 4


def test_a_write_that_fails_leaves_a_hole_that_the_next_chance_fills() -> None:
    desk = Desk(store=lambda inner, clock: FaultyStore(inner, FaultPlan(dead_after_calls=1), clock), batch_pages=4)
    desk.submit("a", 6)
    desk.work()
    assert desk.writes == {"write_error": 6}
    assert (desk.released, desk.pool.free_pages) == (["a"], 64)
    assert desk.backup.holes_in(fake_hashes("a", 6)) == list(range(6))
    desk.store.plan = FaultPlan()
    desk.submit("a", 6)
    desk.work()
    assert desk.backup.holes_in(fake_hashes("a", 6)) == []


def test_a_full_store_is_not_offered_the_rest_of_the_chain() -> None:
    desk = Desk(batch_pages=2)
    desk.memory._config = HiCacheExtConfig(capacity=3 * 4096)
    desk.memory.hit_pages(desk.ns, [])
    desk.submit("a", 8)
    desk.memory._config = HiCacheExtConfig(capacity=0)
    desk.work()
    assert desk.writes == {"full": 8}
    assert desk.released == ["a"]


class SlowDrain:
    def __init__(self) -> None:
        self.done = False

    def is_done(self) -> bool:
        return self.done

    def wait(self, timeout_s: float) -> bool:
        return self.done


class DrainingStore(FaultyStore):
    drain = SlowDrain()

    def write(self, ns: Any, keys: Any, regions: Any, deadline_s: float | None = None) -> WriteResult:
        return WriteResult((WriteOutcome.LATE,) * len(keys), tuple(range(len(keys))), self.drain)


def test_pages_that_the_device_still_reads_are_not_released() -> None:
    desk = Desk(store=lambda inner, clock: DrainingStore(inner, FaultPlan(), clock))
    desk.submit("a", 3)
    desk.work()
    assert desk.released == []
    assert desk.backup.pages_held == 3
    DrainingStore.drain.done = True
    desk.work()
    assert desk.released == ["a"]
    assert desk.writes == {"late": 3}


def test_close_drops_what_waits_and_refuses_more() -> None:
    desk = Desk()
    desk.submit("a", 3)
    assert desk.backup.close(0.0) == []
    assert desk.released == ["a"]
    assert not desk.submit("b", 2)
    assert desk.writes == {"closed": 5}
    assert desk.backup.close(0.0) == []


@pytest.mark.parametrize("bad", [{"batch_pages": 0}, {"queue_pages": 0}, {"holes": -1}, {"write_deadline_s": 0.0}])
def test_bounds_that_cannot_be_meant_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        BackupSettings(**bad)
