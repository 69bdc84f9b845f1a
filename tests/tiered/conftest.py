from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import WriteOutcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.ports import WriteResult
from sglang_hicache_ext.storage_backends.memory import MemoryStore
from sglang_hicache_ext.storage_backends.tiered import TieredStore


class Tier(MemoryStore):
    """A MemoryStore that can be down, refuse pages, or call the test in the middle of a read or a write."""

    def __init__(self, capacity: str = "64MiB") -> None:
        super().__init__(HiCacheExtConfig.parse({"capacity": capacity}))
        self.is_down = self.refuses = False
        self.on_read: Callable[[], Any] = lambda: None
        self.on_write: Callable[[], Any] = lambda: None
        self.on_remove: Callable[[], Any] = lambda: None
        self.reads: list[int] = []
        self.asked: list[int] = []

    def _up(self) -> None:
        if self.is_down:
            raise StoreError("any", "the tier is down")

    def contains(self, ns: Any, keys: Sequence[bytes]) -> Any:
        self._up()
        self.asked.append(len(keys))
        return super().contains(ns, keys)

    def hit_pages(self, ns: Any, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        self._up()
        return super().hit_pages(ns, keys, hold_s)

    def read(self, ns: Any, keys: Sequence[bytes], regions: Any, deadline_s: float | None = None) -> Any:
        self._up()
        self.reads.append(len(keys))
        self.on_read()
        return super().read(ns, keys, regions, deadline_s)

    def write(self, ns: Any, keys: Sequence[bytes], regions: Any, deadline_s: float | None = None) -> Any:
        self._up()
        self.on_write()
        if self.refuses:
            return WriteResult((WriteOutcome.FULL,) * len(keys))
        return super().write(ns, keys, regions, deadline_s)

    def remove(self, ns: Any, keys: Sequence[bytes]) -> int:
        self.on_remove()
        return super().remove(ns, keys)

    def why_absent(self, ns: Any, keys: Sequence[bytes]) -> Any:
        self._up()
        return super().why_absent(ns, keys)


class Pages:
    def __init__(self, count: int, nbytes: int = 4096, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.data = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
        self.target = np.full_like(self.data, 0x5A)
        self.keys = [rng.bytes(32) for _ in range(count)]
        self.fingerprint = Fingerprint("m")
        self.source_regions = regions_of_array(self.data)
        self.target_regions = regions_of_array(self.target, (nbytes // 2, nbytes // 2))

    def source(self, start: int, stop: int) -> Any:
        return self.source_regions.slice(start, stop)


@pytest.fixture
def pages() -> Callable[..., Pages]:
    return Pages


@pytest.fixture
def tiers() -> Iterator[Callable[..., TieredStore]]:
    """Makes tiered stores over two Tiers; closed with the test."""
    made: list[TieredStore] = []

    def make(near_capacity: str = "64MiB", **config: Any) -> TieredStore:
        store = TieredStore(HiCacheExtConfig.parse(config), near=Tier(near_capacity), far=Tier())
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()
