"""Do the simulator and a real run rank the policies alike?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from simulator.results import median_interval

Samples = Mapping[str, Sequence[float]]
"""Policy -> TTFT in seconds of each request; position i is the same request under every policy."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Pairs of policies that both runs can tell apart.

    Attributes:
        pairs: pairs whose 95 % interval of the difference leaves zero out, in the real run and in the simulation.
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
    """Rank by median TTFT over the same requests."""
    both = [p for p in real if p in simulated]
    lines = [_line(p, real[p], simulated[p], seed) for p in both]
    pairs = agreeing = 0
    for a, b in itertools.combinations(both, 2):
        signs = [order(s[a], s[b], seed) for s in (real, simulated)]
        if 0 in signs:
            continue
        pairs += 1
        agreeing += signs[0] == signs[1]
        if signs[0] != signs[1]:
            lines.append(f"{a} and {b} are ranked differently")
    return Agreement(pairs, agreeing, tuple(lines))


def order(a: Sequence[float], b: Sequence[float], seed: int = 1, rounds: int = 2000) -> int:
    """-1 when a's median lies below b's, 1 above, 0 when the interval of the difference holds zero.

    Requests are drawn with both their times at once, so what differs between requests cancels out.
    """
    first, second = np.asarray(a, float), np.asarray(b, float)
    draws = np.random.default_rng(seed).integers(0, len(first), (rounds, len(first)))
    low, high = np.percentile(np.median(first[draws], axis=1) - np.median(second[draws], axis=1), [2.5, 97.5])
    return -1 if high < 0 else 1 if low > 0 else 0


def _line(policy: str, real: Sequence[float], simulated: Sequence[float], seed: int) -> str:
    r, s = float(np.median(real)), float(np.median(simulated))
    low, high = median_interval(list(real), seed)
    return (
        f"{policy:14} real p50 {r:7.3f} s [{low:.3f}, {high:.3f}]  simulated {s:7.3f} s  difference {(s - r) / r:+.1%}"
    )
