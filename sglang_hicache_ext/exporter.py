"""Prometheus series of the package, in SGLang's conventions. The tables below are the only place that names them.

SGLang runs Prometheus in multiprocess mode, where only plain counters, gauges and histograms work; so counters are
advanced by what changed since the last look, and histograms are fed as the values come.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sglang_hicache_ext.metrics import LATENCY_BUCKETS_S, MetricsSnapshot

PREFIXES = ("sglang:", "sglang_")
"""SGLang 0.5.23 exports the first; newer builds the second."""

COUNTERS = {
    "hicache_ext_pages_total": (
        "outcome",
        "Queried pages by their one outcome; the outcomes sum up to the pages queried.",
    ),
    "hicache_ext_page_writes_total": ("outcome", "Pages handed over for writing, by what became of them."),
    "hicache_ext_bytes_total": ("direction", "Payload bytes moved."),
    "hicache_ext_events_total": ("event", "Everything else that is counted; docs/metrics.md lists the events."),
}
"""Series -> (own label, meaning)."""

GAUGES = {
    "hicache_ext_stored_pages": "Pages that can be found.",
    "hicache_ext_used_bytes": "Bytes on disk, the index included.",
    "hicache_ext_capacity_bytes": "Bytes the store may use.",
    "hicache_ext_draining_pages": "Host pages withheld until late I/O into them is over.",
    "hicache_ext_retry_pages": "Refused or failed page writes waiting for their next chance.",
    "hicache_ext_oldest_inflight_seconds": "Age of the oldest store call that is still running.",
    "hicache_ext_queue_age_seconds": "Age of the oldest prefetch that waits for an I/O worker.",
    "hicache_ext_healthy": "1 while the extension serves, 0 when it disabled itself.",
    "hicache_ext_path_info": "Always 1; the labels say which I/O path was asked for and which is in use.",
}
"""Series -> meaning."""

HISTOGRAMS = {"hicache_ext_batch_seconds": ("operation", "Seconds of one batch of pages.")}

BASE_LABELS = ("storage_backend", "tp_rank", "tier")
"""The first two as on SGLang's own storage series; ``tier`` is "" for the whole store, "near" or "far" for a tier of it."""
PATH_LABELS = ("engine_requested", "engine", "direct", "durability")

_BYTES = {"read_bytes": "read", "written_bytes": "written"}
_OPERATIONS = {"read_batch_seconds": "read", "write_batch_seconds": "write"}


def series_names(prefix: str = PREFIXES[0]) -> frozenset[str]:
    """Every name that can show up in a scrape, the suffixes of histograms included."""
    histograms = [h + suffix for h in HISTOGRAMS for suffix in ("_bucket", "_sum", "_count")]
    return frozenset(prefix + name for name in (*COUNTERS, *GAUGES, *histograms))


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a backend: the snapshots of its parts and what only the backend knows.

    Attributes:
        snapshots: of the store and of the adapter; counters of one name are added up.
        gauges: series name without prefix -> value.
        path: PATH_LABELS -> text.
    """

    snapshots: tuple[MetricsSnapshot, ...]
    gauges: Mapping[str, float] = field(default_factory=dict)
    path: Mapping[str, str] = field(default_factory=dict)


class Exporter:
    """Owns the series of one backend in one process. ``publish`` from one thread, ``observe`` from any."""

    _made: ClassVar[dict[tuple[str, int], dict[str, Any]]] = {}
    _made_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, labels: Mapping[str, str], *, prefix: str = PREFIXES[0], registry: Any = None) -> None:
        """Raises ImportError without prometheus_client (the ``metrics`` extra; SGLang brings it)."""
        import prometheus_client

        self._labels = {"tier": "", **labels}
        self._series = self._make(prometheus_client, prefix, registry or prometheus_client.REGISTRY)
        self._seen: dict[tuple[str, str], float] = {}

    def _make(self, client: Any, prefix: str, registry: Any) -> dict[str, Any]:
        """The series of a registry are made once: a backend that is attached again goes on with them."""
        with self._made_lock:
            made = self._made.get((prefix, id(registry)))
            if made is None:
                made = self._made[(prefix, id(registry))] = {}
                for name, (label, text) in COUNTERS.items():
                    made[name] = client.Counter(prefix + name, text, (*BASE_LABELS, label), registry=registry)
                for name, text in GAUGES.items():
                    own = PATH_LABELS if name == "hicache_ext_path_info" else ()
                    made[name] = client.Gauge(
                        prefix + name, text, (*BASE_LABELS, *own), registry=registry, multiprocess_mode="mostrecent"
                    )
                for name, (label, text) in HISTOGRAMS.items():
                    made[name] = client.Histogram(
                        prefix + name, text, (*BASE_LABELS, label), registry=registry, buckets=LATENCY_BUCKETS_S
                    )
            return made

    def observe(self, name: str, seconds: float) -> None:
        """A value of one of the package's histograms; others are left alone."""
        operation = _OPERATIONS.get(name)
        if operation is not None:
            self._series["hicache_ext_batch_seconds"].labels(**self._labels, operation=operation).observe(seconds)

    def publish(self, reading: Reading) -> None:
        """Bring every series up to ``reading``."""
        total = merge(reading.snapshots)
        for outcome, pages in total.outcomes.items():
            self._advance("hicache_ext_pages_total", outcome, pages)
        for outcome, pages in total.writes.items():
            self._advance("hicache_ext_page_writes_total", outcome, pages)
        for name, count in total.counters.items():
            if name in _BYTES:
                self._advance("hicache_ext_bytes_total", _BYTES[name], count)
            else:
                self._advance("hicache_ext_events_total", name, count)
        for name, amount in reading.gauges.items():
            self._series[name].labels(**self._labels).set(amount)
        if reading.path:
            self._series["hicache_ext_path_info"].labels(**self._labels, **reading.path).set(1)

    def _advance(self, series: str, label: str, value: float) -> None:
        before = self._seen.get((series, label), 0.0)
        if value > before:
            own = COUNTERS[series][0]
            self._series[series].labels(**self._labels, **{own: label}).inc(value - before)
        self._seen[series, label] = value


def merge(snapshots: tuple[MetricsSnapshot, ...]) -> MetricsSnapshot:
    """Add up counters and outcomes; histograms and gauges stay with their owners."""
    counters: dict[str, float] = {}
    outcomes: Counter[str] = Counter()
    writes: Counter[str] = Counter()
    for one in snapshots:
        outcomes.update(one.outcomes)
        writes.update(one.writes)
        for name, value in one.counters.items():
            counters[name] = counters.get(name, 0.0) + value
    return MetricsSnapshot(counters, dict(outcomes), dict(writes), {}, {})
