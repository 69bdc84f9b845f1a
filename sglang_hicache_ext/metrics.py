"""Counters and histograms of the package, kept in plain Python; exporters read snapshots.

Every queried page increments exactly one outcome, so the outcomes of a tier sum up to the pages queried.
Thread-safe: one short lock per update of a batch, never one per page.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sglang_hicache_ext.outcome import Outcome, WriteOutcome

LATENCY_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


@dataclass(slots=True)
class Histogram:
    """Cumulative-ready histogram: counts[i] observations at or below buckets[i], the last is +Inf."""

    buckets: tuple[float, ...] = LATENCY_BUCKETS_S
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.buckets) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.buckets, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class Metrics:
    """One instance per store or pipeline. Names are given in docs/metrics.md and tested against it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._outcomes: Counter[Outcome] = Counter()
        self._writes: Counter[WriteOutcome] = Counter()
        self._histograms: dict[str, Histogram] = {}
        self._gauges: dict[str, float] = {}
        self._sinks: tuple[Callable[[str, float], None], ...] = ()

    def add(self, name: str, value: float = 1) -> None:
        with self._lock:
            self._counters[name] += value  # type: ignore[assignment]

    def set(self, name: str, value: float) -> None:
        with self._lock:
            self._gauges[name] = value

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._histograms.setdefault(name, Histogram()).observe(seconds)
            sinks = self._sinks
        for sink in sinks:
            sink(name, seconds)

    def attach(self, sink: Callable[[str, float], None]) -> None:
        """Hand every later histogram value to ``sink`` as well, on the thread that measured it; it must not raise."""
        with self._lock:
            self._sinks = (*self._sinks, sink)

    def detach(self, sink: Callable[[str, float], None]) -> None:
        with self._lock:
            self._sinks = tuple(s for s in self._sinks if s != sink)

    def pages(self, outcomes: Iterable[Outcome]) -> None:
        """Record the final outcome of each queried page: one by one, or as a Counter of pages per outcome."""
        with self._lock:
            self._outcomes.update(outcomes)

    def writes(self, outcomes: Iterable[WriteOutcome]) -> None:
        with self._lock:
            self._writes.update(outcomes)

    def snapshot(self) -> MetricsSnapshot:
        with self._lock:
            return MetricsSnapshot(
                dict(self._counters),
                {str(k): v for k, v in self._outcomes.items()},
                {str(k): v for k, v in self._writes.items()},
                {k: Histogram(h.buckets, list(h.counts), h.total) for k, h in self._histograms.items()},
                dict(self._gauges),
            )


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    counters: Mapping[str, float]
    outcomes: Mapping[str, int]
    writes: Mapping[str, int]
    histograms: Mapping[str, Histogram]
    gauges: Mapping[str, float]

    @property
    def pages_queried(self) -> int:
        return sum(self.outcomes.values())
