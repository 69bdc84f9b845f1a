"""Seeded models of how slow a store is. The simulator and the slowed real store use the same objects.

A draw depends on the seed and the first key of the batch only, not on the order of calls: every policy meets the
same slow batches, in simulation and in a real run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sglang_hicache_ext.errors import ConfigError

_MASK = (1 << 64) - 1


def uniform(seed: int, key: int) -> float:
    """A number in (0, 1], a pure function of its arguments (splitmix64)."""
    z = (key * 0x9E3779B97F4A7C15 + seed * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) + 1) / (1 << 64)


class LatencyModel(Protocol):
    """Times are seconds since the model's own start."""

    @property
    def kind(self) -> str: ...

    def delay_s(self, key: int, now_s: float) -> float:
        """Seconds from the call to the first byte of the batch whose first page is ``key``."""
        ...

    def share(self, now_s: float) -> float:
        """Part of the store's bandwidth that is ours at ``now_s``, in (0, 1]."""
        ...

    def next_change_s(self, now_s: float) -> float | None:
        """When ``share`` changes next; None when it never does."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Every batch waits the same."""

    seed: int = 1
    base_s: float = 0.002
    kind: str = "constant"

    def delay_s(self, key: int, now_s: float) -> float:
        return self.base_s

    def share(self, now_s: float) -> float:
        return 1.0

    def next_change_s(self, now_s: float) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class HeavyTail(Constant):
    """Pareto delays: ``base_s`` at best, beyond x with probability (base_s / x) ** alpha, at most ``cap_s``."""

    base_s: float = 0.015
    alpha: float = 1.0
    cap_s: float = 10.0
    kind: str = "heavy_tail"

    def delay_s(self, key: int, now_s: float) -> float:
        return float(min(self.cap_s, self.base_s * uniform(self.seed, key) ** (-1 / self.alpha)))


@dataclass(frozen=True, slots=True)
class LogNormal(Constant):
    """Lognormal delays with median ``base_s``."""

    base_s: float = 0.02
    sigma: float = 1.5
    cap_s: float = 10.0
    kind: str = "lognormal"

    def delay_s(self, key: int, now_s: float) -> float:
        radius = math.sqrt(-2 * math.log(uniform(self.seed, key)))
        z = radius * math.cos(2 * math.pi * uniform(self.seed + 1, key))
        return min(self.cap_s, self.base_s * math.exp(self.sigma * z))


@dataclass(frozen=True, slots=True)
class Stall(Constant):
    """Nothing is answered for ``stall_s`` out of every ``every_s`` seconds; the phase follows from the seed."""

    stall_s: float = 3.0
    every_s: float = 20.0
    kind: str = "stall"

    def delay_s(self, key: int, now_s: float) -> float:
        into = (now_s + uniform(self.seed, 0) * self.every_s) % self.every_s
        return self.base_s + max(0.0, self.stall_s - into)


@dataclass(frozen=True, slots=True)
class SharedBandwidth(Constant):
    """A neighbour takes bandwidth: ``low`` of it is ours during the first ``duty`` of every period."""

    low: float = 0.25
    duty: float = 0.4
    period_s: float = 30.0
    kind: str = "shared_bandwidth"

    def _into(self, now_s: float) -> float:
        return (now_s + uniform(self.seed, 0) * self.period_s) % self.period_s

    def share(self, now_s: float) -> float:
        return self.low if self._into(now_s) < self.duty * self.period_s else 1.0

    def next_change_s(self, now_s: float) -> float | None:
        into, edge = self._into(now_s), self.duty * self.period_s
        return now_s + max(1e-6, (edge if into < edge else self.period_s) - into)


_KINDS: dict[str, type[Constant]] = {
    "constant": Constant,
    "heavy_tail": HeavyTail,
    "lognormal": LogNormal,
    "stall": Stall,
    "shared_bandwidth": SharedBandwidth,
}


def latency_model(spec: dict[str, Any]) -> LatencyModel:
    """Build a model from ``{"kind": ..., "seed": ..., ...}``. Raises ConfigError."""
    kind = spec.get("kind")
    if kind not in _KINDS:
        raise ConfigError(f"latency kind is {kind!r}", "latency model", f"write one of: {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](**{k: v for k, v in spec.items() if k != "kind"})
    except TypeError as e:
        raise ConfigError(str(e), f"latency model {kind!r}", "use the fields of the class") from e


def describe(model: LatencyModel) -> dict[str, Any]:
    """JSON-ready parameters; ``latency_model`` takes them back."""
    return asdict(model)  # type: ignore[call-overload, no-any-return]
