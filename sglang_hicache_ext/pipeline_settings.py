"""Sizes and bounds of a prefetch pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_hicache_ext.budget import BudgetSettings
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.scheduling import BatchSizes


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Refuses what cannot be meant.

    Attributes:
        budget: threshold and host pages.
        batches: pages per store call.
        io_workers: threads that read.
        slots: prefetches under way at once, those still draining included.
        queue: prefetches that may wait for a slot; more are declined as rate limited.
        read_deadline_s: handed to the store with every read.
        hold_s: how long the store keeps hit pages from being reclaimed.
        stall_limit_s: a store call older than this marks the store as stuck: requests recompute until it returns.
        prefill_tokens_per_s: 0.0 measures it (``Pipeline.observe_prefill``).
    """

    budget: BudgetSettings = field(default_factory=BudgetSettings)
    batches: BatchSizes = field(default_factory=BatchSizes)
    io_workers: int = 2
    slots: int = 256
    queue: int = 1024
    read_deadline_s: float = 10.0
    hold_s: float = 60.0
    stall_limit_s: float = 30.0
    prefill_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        self._refuse_below({"io_workers": 1, "slots": 1, "queue": 0, "hold_s": 0, "prefill_tokens_per_s": 0})
        for name in ("read_deadline_s", "stall_limit_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", "prefetch pipeline", "write seconds above 0")

    def _refuse_below(self, lowest: dict[str, int]) -> None:
        for name, low in lowest.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", "prefetch pipeline", f"write {low} or more")
