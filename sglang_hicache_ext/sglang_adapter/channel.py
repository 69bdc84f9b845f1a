"""One host pool of this rank joined to the store: keys and host indices in, one bool per page out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.keys import key_bytes
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.ports import Namespace, PageStore
from sglang_hicache_ext.sglang_adapter.epoch import WeightEpoch
from sglang_hicache_ext.sglang_adapter.host_pool import PoolPages, page_slots
from sglang_hicache_ext.sglang_adapter.identity import Deployment, pool_fingerprint
from sglang_hicache_ext.sglang_adapter.quarantine import quarantine_of
from sglang_hicache_ext.sglang_adapter.retry import WriteRetry
from sglang_hicache_ext.sglang_adapter.stats import TransferStats

MAX_NAMESPACES = 64
"""Epochs of one pool remembered for ``clear``."""


class PoolChannel:
    """Thread-safe; SGLang reads, writes and queries from three threads.

    A pool without bytes (``pages`` is None, the logical anchor of DeepSeek V4) answers that everything is there.
    """

    def __init__(
        self,
        name: str,
        pool: Any,
        pages: PoolPages | None,
        *,
        store: PageStore,
        deployment: Deployment,
        epoch: WeightEpoch,
        retry: WriteRetry,
        stats: TransferStats,
    ) -> None:
        self.name, self.pool, self.pages = name, pool, pages
        self._store, self._deployment, self._epoch = store, deployment, epoch
        self._retry, self._stats = retry, stats
        self._namespaces: dict[int, Namespace] = {}
        self._quarantine = quarantine_of(pool, pages.page_tokens) if pages is not None else None

    @property
    def namespace(self) -> Namespace:
        """The namespace of the pages that are made and asked for now."""
        epoch = self._epoch.now
        known = self._namespaces.get(epoch.number)
        if known is None:
            assert self.pages is not None
            fingerprint = pool_fingerprint(
                self._deployment, self.pool, self.name, self.pages, weights=epoch.weights, epoch=epoch.value
            )
            known = self._store.namespace(fingerprint)
            self._namespaces[epoch.number] = known
            if len(self._namespaces) > MAX_NAMESPACES:
                self._namespaces.pop(min(self._namespaces))
        return known

    @property
    def namespaces(self) -> list[Namespace]:
        """Every namespace this channel used, the current one included."""
        current = [] if self.pages is None else [self.namespace]
        return list({ns.id: ns for ns in [*current, *self._namespaces.values()]}.values())

    @property
    def draining_pages(self) -> int:
        return self._quarantine.held_pages if self._quarantine is not None else 0

    def present(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Say for each key whether its page is stored. From memory."""
        if self.pages is None:
            return np.ones(len(keys), np.bool_)
        return self._store.contains(self.namespace, [key_bytes(k) for k in keys])

    def hit_pages(self, keys: Sequence[str], hold_s: float) -> int:
        """Leading pages present, held for ``hold_s`` seconds."""
        if self.pages is None or not keys:
            return len(keys)
        return self._store.hit_pages(self.namespace, [key_bytes(k) for k in keys], hold_s)

    def read(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Read pages into the pool; True where the bytes proved themselves."""
        if self.pages is None or not keys:
            return [True] * len(keys)
        slots = page_slots(host_indices, len(keys), self.pages.page_tokens)
        regions = self.pages.for_read(slots)
        started = time.perf_counter()
        result = self._store.read(self.namespace, [key_bytes(k) for k in keys], regions)
        if result.drain is not None and self.pages.form == "regions" and self._quarantine is not None:
            self._quarantine.hold(slots[list(result.draining)], result.drain)
        self.pages.finish(slots, regions, result.outcomes)
        loaded = [o is Outcome.LOADED for o in result.outcomes]
        self._stats.read(sum(loaded), sum(loaded) * regions.page_bytes, time.perf_counter() - started)
        return loaded

    def write(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Write pages of the pool; True where the page is stored, or kept for another try."""
        if self.pages is None or not keys:
            return [True] * len(keys)
        slots = page_slots(host_indices, len(keys), self.pages.page_tokens)
        regions, raw, ns = self.pages.for_write(slots), [key_bytes(k) for k in keys], self.namespace
        started = time.perf_counter()
        try:
            result = self._store.write(ns, raw, regions)
        except StoreError:
            kept = set(self._retry.take(ns, raw, regions, list(range(len(raw)))))
            if not kept:
                raise
            return [i in kept for i in range(len(raw))]
        stored = [o.is_stored for o in result.outcomes]
        self._stats.wrote(sum(stored), sum(stored) * regions.page_bytes, time.perf_counter() - started)
        failed = [i for i, ok in enumerate(stored) if not ok]
        for position in self._retry.take(ns, raw, regions, failed) if failed else ():
            stored[position] = True
        return stored
