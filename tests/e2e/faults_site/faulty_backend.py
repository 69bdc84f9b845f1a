"""Our backend over a store with seeded faults; reached through SGLang's ``dynamic`` backend."""

from __future__ import annotations

from typing import Any

from sglang_hicache_ext.sglang_adapter import storage
from sglang_hicache_ext.testing.faults import FaultPlan, FaultyStore

PLAN = FaultPlan(seed=7, read_error=0.1, bit_flip=0.1, late=0.1, late_s=0.2, latency_s=(0.0, 0.02))


class FaultyBackend(storage.HiCacheExtStorage):
    def _open(self, storage_config: Any) -> None:
        original = storage.open_named_store
        storage.open_named_store = lambda name, config: FaultyStore(original(name, config), PLAN)
        try:
            super()._open(storage_config)
        finally:
            storage.open_named_store = original
