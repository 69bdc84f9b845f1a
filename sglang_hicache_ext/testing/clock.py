"""Clocks that tests drive by hand."""

from __future__ import annotations

from sglang_hicache_ext.ports import Clock


class ManualClock:
    """Monotonic seconds that move only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back {seconds} s")
        self._now += seconds


class SkewedClock:
    """Another clock, ``offset_s`` ahead: the clock of another node. No two readings are equal."""

    def __init__(self, base: Clock, offset_s: float) -> None:
        self._base, self._offset_s = base, offset_s
        self._readings = 0

    def now(self) -> float:
        self._readings += 1
        return self._base.now() + self._offset_s + self._readings * 1e-9
