"""What a benchmark measures: raw samples, and the statistics read from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class BadInput(Exception):
    """The user asked for something that cannot be: one message, exit code 2."""


class WrongBytes(Exception):
    """A store delivered bytes that do not belong to the key: the run fails."""


class WarmRead(Exception):
    """A read that was to be cold did not come from the device: the run says so and fails."""


@dataclass(slots=True)
class Measurement:
    """What one execution of an arm returns.

    Attributes:
        values: metric name -> number; the unit is the name's suffix (``gb_s``, ``ttft_ms``, ``cpu_s_per_gb``).
        series: metric name -> raw observations of that execution (latencies); summarised as p50/p90/p99.
        facts: anything a reader needs to judge the numbers (how cold was made, bytes from the device, ...).
    """

    values: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One execution of one arm in one round. ``error`` is set when it failed: a data point, never skipped."""

    case: str
    arm: str
    round: int
    order: int
    started_s: float
    elapsed_s: float
    values: Mapping[str, float]
    series: Mapping[str, Sequence[float]]
    facts: Mapping[str, Any]
    error: str = ""

    def words(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "arm": self.arm,
            "round": self.round,
            "order": self.order,
            "started_s": round(self.started_s, 6),
            "elapsed_s": round(self.elapsed_s, 6),
            "values": dict(self.values),
            "series": {k: [round(float(x), 6) for x in v] for k, v in self.series.items()},
            "facts": dict(self.facts),
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Spread:
    """Order statistics of one metric. ``spread`` is (max - min) / p50."""

    n: int
    p50: float
    p90: float
    p99: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.p50 if self.p50 else 0.0

    def words(self) -> dict[str, float]:
        return {
            "n": self.n,
            "p50": self.p50,
            "p90": self.p90,
            "p99": self.p99,
            "min": self.low,
            "max": self.high,
            "spread": self.spread,
        }


def spread_of(values: Iterable[float]) -> Spread | None:
    """Order statistics (linear interpolation), None without values."""
    array = np.asarray(list(values), float)
    if not len(array):
        return None
    p50, p90, p99 = (float(x) for x in np.percentile(array, (50, 90, 99)))
    return Spread(len(array), p50, p90, p99, float(array.min()), float(array.max()))


def metric_values(samples: Iterable[Sample], case: str, arm: str, metric: str) -> list[float]:
    """Every observation of ``metric``: the samples' values, or else all raw observations of their series."""
    own = [s for s in samples if s.case == case and s.arm == arm and not s.error]
    values = [s.values[metric] for s in own if metric in s.values]
    return values or [float(x) for s in own for x in s.series.get(metric, ())]


def paired_ratios(samples: Sequence[Sample], case: str, arm: str, base: str, metric: str) -> list[float]:
    """``arm`` / ``base`` within each round, so that a drift of the device cancels out."""
    by_round: dict[tuple[str, int], float] = {
        (s.arm, s.round): s.values[metric]
        for s in samples
        if s.case == case and not s.error and metric in s.values and s.arm in (arm, base)
    }
    rounds = sorted({r for _, r in by_round})
    return [
        by_round[arm, r] / by_round[base, r]
        for r in rounds
        if (arm, r) in by_round and (base, r) in by_round and by_round[base, r]
    ]


def table_rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row per (case, arm): how many ran, how many failed, and the spread of each metric."""
    rows: list[dict[str, Any]] = []
    for case, arm in dict.fromkeys((s.case, s.arm) for s in samples):
        own = [s for s in samples if s.case == case and s.arm == arm]
        names = dict.fromkeys(name for s in own for name in (*s.values, *s.series))
        metrics = {name: spread_of(metric_values(own, case, arm, name)) for name in names}
        rows.append(
            {
                "case": case,
                "arm": arm,
                "samples": len(own),
                "errors": [s.error for s in own if s.error],
                "metrics": {k: v.words() for k, v in metrics.items() if v is not None},
            }
        )
    return rows
