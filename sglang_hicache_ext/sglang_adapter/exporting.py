"""Our series beside SGLang's, from the process that owns the backend. Looks once a second at most, never raises."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_hicache_ext.exporter import PREFIXES, Exporter, Reading

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
    """Publishes one backend. ``tick`` is called by the scheduler thread on every iteration."""

    def __init__(self, backend: HiCacheExtStorage, labels: dict[str, str], *, registry: Any = None) -> None:
        self._backend = backend
        self._exporter = Exporter(labels, prefix=metric_prefix(), registry=registry)
        self._last = -EVERY_S
        self._metrics = getattr(backend.store, "metrics", None)
        if self._metrics is not None:
            self._metrics.attach(self._exporter.observe)

    def tick(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Publish when the last time is a second ago."""
        now = clock()
        if now - self._last >= EVERY_S:
            self._last = now
            self._exporter.publish(reading_of(self._backend))

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.detach(self._exporter.observe)


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
    told = backend.describe()
    parts = [m.snapshot() for m in (backend.metrics, getattr(backend.store, "metrics", None)) if m is not None]
    gauges = {
        "hicache_ext_stored_pages": float(told["pages"]),
        "hicache_ext_used_bytes": float(told["used_bytes"]),
        "hicache_ext_capacity_bytes": float(told["capacity_bytes"]),
        "hicache_ext_draining_pages": float(told["draining_pages"]),
        "hicache_ext_retry_pages": float(told["retry_pages"]),
        "hicache_ext_oldest_inflight_seconds": backend.oldest_inflight_s(),
        "hicache_ext_queue_age_seconds": max((p.gauges.get("queue_age_seconds", 0.0) for p in parts), default=0.0),
        "hicache_ext_healthy": 0.0 if told["disabled"] else 1.0,
    }
    return Reading(tuple(parts), gauges, path_of(told["store"]))


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
