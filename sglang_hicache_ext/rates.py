"""Measured rates: how fast the store delivers pages, how fast the model computes them. Owner thread only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RateMeter:
    """Units per busy second over overlapping pieces of work; old work fades out.

    Work that overlaps in time (several I/O workers) counts its wall time once. ``half_life`` is in seconds of
    busy time: after that much new work, old work has half its weight. A piece that took long and
    brought nothing lowers the rate.
    """

    half_life_s: float = 2.0
    _units: float = 0.0
    _busy_s: float = 0.0
    _busy_until: float = float("-inf")

    def record(self, units: float, started_at: float, ended_at: float) -> None:
        """Add one piece of work, by the Clock; pieces may come in any order."""
        new_s = max(0.0, ended_at - max(started_at, self._busy_until))
        self._busy_until = max(self._busy_until, ended_at)
        keep = 0.5 ** (new_s / self.half_life_s)
        self._units = self._units * keep + units
        self._busy_s = self._busy_s * keep + new_s

    @property
    def per_s(self) -> float:
        """Units per second; 0.0 while nothing with a duration was recorded."""
        return self._units / self._busy_s if self._busy_s > 0 else 0.0
