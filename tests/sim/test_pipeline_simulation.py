"""2,000 seeded runs of the whole pipeline over one to three ranks, with every fault the kit knows."""

from __future__ import annotations

import pytest

from sglang_hicache_ext.storage_backends.memory import MemoryStore
from sglang_hicache_ext.testing.clock import ManualClock
from sglang_hicache_ext.testing.sim import run_seed


def memory_store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.mark.slow
def test_the_books_balance_after_every_step_of_every_seed(sim_seeds: range) -> None:
    for seed in sim_seeds:
        run_seed(seed, memory_store)
