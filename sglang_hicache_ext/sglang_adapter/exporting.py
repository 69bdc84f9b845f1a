"""Our series beside SGLang's, from the process that owns the backend.

SGLang's scheduler thread only says that it is time; the look itself asks the file system and the index, so it runs on
a thread of its own: a hung drive costs fresh figures, never the scheduler.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_hicache_ext.exporter import PREFIXES, Exporter, Reading
from sglang_hicache_ext.ports import PageStore
from sglang_hicache_ext.storage_backends.engines.workers import DaemonWorkers

if TYPE_CHECKING:
    from sglang_hicache_ext.sglang_adapter.storage import HiCacheExtStorage

logger = logging.getLogger(__name__)

EVERY_S = 1.0
COLLECTOR = "sglang.srt.observability.metrics_collector"


def metric_prefix(module: str = COLLECTOR) -> str:
    """The prefix of this SGLang's own series, read from the source of its collector."""
    found = importlib.util.find_spec(module)
    if found is None or not found.origin:
        return PREFIXES[0]
    with open(found.origin, encoding="utf-8") as file:
        text = file.read()
    return PREFIXES[1] if f'"{PREFIXES[0]}' not in text and f'"{PREFIXES[1]}' in text else PREFIXES[0]


class BackendExport:
    """Publishes one backend, once a second at most and one look at a time.

    ``tick`` is called by the scheduler thread on every iteration and returns at once.
    """

    def __init__(self, backend: HiCacheExtStorage, labels: dict[str, str], *, registry: Any = None) -> None:
        self._backend = backend
        prefix = metric_prefix()
        self._exporter = Exporter(labels, prefix=prefix, registry=registry)
        self._tiers = [
            (store, Exporter({**labels, "tier": tier}, prefix=prefix, registry=registry))
            for tier, store in tiers_of(backend.store).items()
        ]
        self._last = -EVERY_S
        self._workers = DaemonWorkers(1, "hicache-export")
        self._idle = threading.Event()
        self._idle.set()
        self._heard = [
            (store.metrics, exporter.observe)
            for store, exporter in [(backend.store, self._exporter), *self._tiers]
            if hasattr(store, "metrics")
        ]
        for metrics, observe in self._heard:
            metrics.attach(observe)

    def tick(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Have a look taken when the last one began a second ago and is over."""
        now = clock()
        if now - self._last >= EVERY_S and self._idle.is_set():
            self._last = now
            self._idle.clear()
            if not self._workers.submit(self._look):
                self._idle.set()

    def _look(self) -> None:
        try:
            self._backend.guarded("export", lambda: self._exporter.publish(reading_of(self._backend)))
            for store, exporter in self._tiers:
                self._backend.guarded("export", lambda s=store, e=exporter: e.publish(reading_of_tier(s)))  # type: ignore[misc]
        finally:
            self._idle.set()

    def wait(self, timeout_s: float) -> bool:
        """Block until no look is being taken; False on timeout."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        for metrics, observe in self._heard:
            metrics.detach(observe)
        self._workers.close(timeout_s=1.0)


def open_export(backend: HiCacheExtStorage, storage_config: Any) -> BackendExport | None:
    """The export of ``backend`` when SGLang runs with metrics; None otherwise, or when it cannot be (logged)."""
    if not getattr(storage_config, "enable_storage_metrics", False):
        return None
    labels = {"storage_backend": backend.backend_name, "tp_rank": str(getattr(storage_config, "tp_rank", 0))}
    try:
        return BackendExport(backend, labels)
    except (ImportError, ValueError) as error:
        logger.warning("sglang-hicache-ext exports no metrics: %s", error)
        return None


def reading_of(backend: HiCacheExtStorage) -> Reading:
    """One look at ``backend``."""
    stats = backend.store.stats()
    parts = [m.snapshot() for m in (backend.metrics, getattr(backend.store, "metrics", None)) if m is not None]
    gauges = {
        "hicache_ext_stored_pages": float(stats.pages),
        "hicache_ext_used_bytes": float(stats.used_bytes),
        "hicache_ext_capacity_bytes": float(stats.capacity_bytes),
        "hicache_ext_draining_pages": float(backend.draining_pages),
        "hicache_ext_retry_pages": float(backend.retry_pages),
        "hicache_ext_oldest_inflight_seconds": backend.oldest_inflight_s(),
        "hicache_ext_queue_age_seconds": max((p.gauges.get("queue_age_seconds", 0.0) for p in parts), default=0.0),
        "hicache_ext_healthy": 0.0 if backend.disabled else 1.0,
    }
    return Reading(tuple(parts), gauges, path_of(backend.store.describe()))


def tiers_of(store: PageStore) -> dict[str, PageStore]:
    """The tiers that a tiered store is made of; {} for one that is whole."""
    return {tier: getattr(store, tier) for tier in ("near", "far") if hasattr(store, tier)}


def reading_of_tier(store: PageStore) -> Reading:
    """One look at a tier: its own outcomes, bytes and path."""
    stats, metrics = store.stats(), getattr(store, "metrics", None)
    gauges = {
        "hicache_ext_stored_pages": float(stats.pages),
        "hicache_ext_used_bytes": float(stats.used_bytes),
        "hicache_ext_capacity_bytes": float(stats.capacity_bytes),
    }
    return Reading((metrics.snapshot(),) if metrics is not None else (), gauges, path_of(store.describe()))


def path_of(store: dict[str, Any]) -> dict[str, str]:
    """Asked for and in use, as labels; a tiered store shows its near tier."""
    shown = store.get("near", store)
    engines = shown.get("engines") or [{}]
    return {
        "engine_requested": str(shown.get("engine_requested", shown.get("transport_requested", ""))),
        "engine": str(shown.get("engine", shown.get("transport", shown.get("store", "")))),
        "direct": str(engines[0].get("direct", "")),
        "durability": str(shown.get("durability", "")),
    }
