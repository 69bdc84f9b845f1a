"""Our NVMe store as a contestant: one arm per engine, and the same without the cost of hashing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from harness import Arena, page_keys

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.ports import PageStore
from sglang_hicache_ext.storage_backends.record import DIGEST_BYTES, PageDigests
from storage_bench.shape import BATCH_PAGES, DEPTH, GIB, Batch, Unavailable, batches

ENGINES = ("io_uring", "posix", "kvikio", "aiofiles")
CALL_DEADLINE_S = 60.0
SEGMENT = 128 << 20
"""Bytes. A store of 8 GiB chooses this by itself, a larger one more; the small ones made here would choose less."""


class Ours:
    """The store a user gets, checksums are always on.

    Args:
        engine: as in the configuration.
        capacity: bytes. Writing more than that measures the steady state, in which segments are reused.
    """

    reads_in_place = False
    is_buffered = False

    def __init__(self, directory: str, arena: Arena, engine: str, capacity: int = 8 * GIB) -> None:
        from sglang_hicache_ext.storage_backends import open_store

        self.name = f"ours-{engine}"
        self._directory, self._arena = directory, arena
        self.requested = {
            "path": directory, "engine": engine, "capacity": capacity, "io_depth": DEPTH, "reinsert": False,
            "segment": SEGMENT if capacity >= 8 * SEGMENT else 0,
        }  # fmt: skip
        try:
            self._store: PageStore = open_store(HiCacheExtConfig.parse(self.requested))
        except CapabilityError as exc:
            raise Unavailable(str(exc)) from exc
        register = getattr(self._store, "register_memory", None)
        self._is_registered = bool(register and register(arena.addr, arena.array.nbytes))
        self._ns = self._store.namespace(Fingerprint(model="bench_storage", page_tokens=1, layout="page_first"))

    def write(self, batch: Batch) -> None:
        regions = self._arena.regions(batch.start, batch.start + len(batch))
        outcomes = self._store.write(self._ns, batch.keys, regions, CALL_DEADLINE_S).outcomes
        bad = [o for o in outcomes if not o.is_stored]
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(batch)} pages not stored: {bad[0]}")

    def read(self, batch: Batch) -> None:
        regions = self._arena.regions(batch.start, batch.start + len(batch))
        outcomes = self._store.read(self._ns, batch.keys, regions, CALL_DEADLINE_S).outcomes
        bad = [o for o in outcomes if o is not Outcome.LOADED]
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(batch)} pages not loaded: {bad[0]}")

    def count_present(self, batch: Batch) -> int:
        return self._store.hit_pages(self._ns, batch.keys)

    def use_up(self, page_bytes: int) -> None:
        """Write until every segment has been used once: what is measured then is how a full store writes."""
        described = self._store.describe()
        left = described["max_segments"] * described["segment_bytes"]
        rows = np.arange(min(BATCH_PAGES, self._arena.array.nbytes // page_bytes))
        for turn in range(-(-left // (len(rows) * page_bytes))):
            self.write(next(batches(page_keys(len(rows), f"use up {turn}"), rows)))

    def forget(self) -> None:
        """Nothing: a full store reuses its oldest segment, which is part of what a write costs."""

    def files(self) -> list[Path]:
        return [p for p in Path(self._directory).rglob("*.seg") if p.is_file()]

    def describe(self) -> dict[str, Any]:
        return {**self._store.describe(), "is_arena_registered": self._is_registered}

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class WithoutHashing(Ours):
    """The same store while this benchmark replaces the digest by a constant: what moving bytes alone costs.

    The product has no such switch. Only for one caller at a time: the replacement is process-wide.
    """

    def __init__(self, directory: str, arena: Arena, engine: str, capacity: int = 8 * GIB) -> None:
        super().__init__(directory, arena, engine, capacity)
        self.name = f"{self.name}-nosum"

    def write(self, batch: Batch) -> None:
        with _ConstantDigest():
            super().write(batch)

    def read(self, batch: Batch) -> None:
        with _ConstantDigest():
            super().read(batch)


class _ConstantDigest:
    def __enter__(self) -> None:
        self._real = PageDigests.digest
        constant = bytes(DIGEST_BYTES)
        PageDigests.digest = lambda _self, _page: constant

    def __exit__(self, *_: object) -> None:
        PageDigests.digest = self._real
