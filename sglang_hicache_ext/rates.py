"""Measured rates: how fast the store delivers pages, how fast the model computes them. Owner thread only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RateMeter:
    """Units per busy second over overlapping pieces of work: the typical rate of the last few pieces.

    Work that overlaps in time (several I/O workers) counts its wall time once. A single outlier says little about
    the next piece, so one piece counts as at most ``outlier`` times slower than expected; a lasting change is
    followed within about twenty pieces. A piece that brought nothing counts in full and lowers the rate.

    Attributes:
        half_life: pieces after which an old piece has half its weight.
        outlier: most times slower than expected one piece may count.
        total_s: busy seconds of all pieces so far, each as long as it was.
    """

    half_life: float = 16.0
    outlier: float = 3.0
    total_s: float = 0.0
    _pieces: float = 0.0
    _units: float = 0.0
    _busy_s: float = 0.0
    _busy_until: float = float("-inf")

    def record(self, units: float, started_at: float, ended_at: float) -> None:
        """Add one piece of work, by the Clock; pieces may come in any order."""
        new_s = max(0.0, ended_at - max(started_at, self._busy_until))
        self._busy_until = max(self._busy_until, ended_at)
        self.total_s += new_s
        if units and self._busy_s > 0 and self._units > 0:
            usual_s = max(units, self._units / self._pieces) * self._busy_s / self._units
            new_s = min(new_s, self.outlier * usual_s)
        keep = 0.5 ** (1 / self.half_life) if new_s else 1.0
        self._pieces = self._pieces * keep + 1
        self._units = self._units * keep + units
        self._busy_s = self._busy_s * keep + new_s

    @property
    def per_s(self) -> float:
        """Units per second; 0.0 while nothing with a duration was recorded."""
        return self._units / self._busy_s if self._busy_s > 0 else 0.0
