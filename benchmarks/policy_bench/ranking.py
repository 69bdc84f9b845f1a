"""Do the simulator and a real run rank the policies alike?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.results import median_interval

Samples = Mapping[str, Sequence[float]]
"""Policy -> raw TTFT in seconds."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Pairs of policies whose intervals do not overlap, in the real run and in the simulation.

    Attributes:
        pairs: decided in both.
        agreeing: of those, ranked alike.
        lines: one line per policy with both medians and their difference, and one per disagreement.
    """

    pairs: int
    agreeing: int
    lines: tuple[str, ...]

    @property
    def share(self) -> float | None:
        return self.agreeing / self.pairs if self.pairs else None


def compare(real: Samples, simulated: Samples, seed: int = 1) -> Agreement:
    """Rank by median TTFT; a pair counts when its 95 % intervals are disjoint in both."""
    spans = {name: {p: median_interval(list(v), seed) for p, v in s.items()} for name, s in _named(real, simulated)}
    lines = [_line(p, real[p], simulated[p], spans) for p in real if p in simulated]
    pairs = agreeing = 0
    for a, b in itertools.combinations([p for p in real if p in simulated], 2):
        signs = [_order(spans[name][a], spans[name][b]) for name in ("real", "simulated")]
        if 0 in signs:
            continue
        pairs += 1
        agreeing += signs[0] == signs[1]
        if signs[0] != signs[1]:
            lines.append(f"{a} and {b} are ranked differently")
    return Agreement(pairs, agreeing, tuple(lines))


def _named(real: Samples, simulated: Samples) -> tuple[tuple[str, Samples], tuple[str, Samples]]:
    return ("real", real), ("simulated", simulated)


def _order(a: tuple[float, float], b: tuple[float, float]) -> int:
    """-1 when a lies below b, 1 above, 0 when they overlap."""
    return -1 if a[1] < b[0] else 1 if a[0] > b[1] else 0


def median(values: Sequence[float]) -> float:
    ranked = sorted(values)
    middle = len(ranked) // 2
    return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2


def _line(
    policy: str,
    real: Sequence[float],
    simulated: Sequence[float],
    spans: Mapping[str, Mapping[str, tuple[float, float]]],
) -> str:
    r, s = median(real), median(simulated)
    low, high = spans["real"][policy]
    return (
        f"{policy:14} real p50 {r:7.3f} s [{low:.3f}, {high:.3f}]  simulated {s:7.3f} s  difference {(s - r) / r:+.1%}"
    )
