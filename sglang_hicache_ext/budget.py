"""What a prefetch may use: the threshold, its share of the host pool, and when a short one tries again.

Owner thread only. Every decision depends on data that is equal on all ranks, so all ranks decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import ConfigError, InvariantError
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.ports import HostPool


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """Limits of the prefetch side.

    Attributes:
        page_tokens: tokens per page.
        threshold_tokens: shortest hit worth loading; at least one page.
        host_share: share of the host pool that prefetches may hold, loading and draining together.
        retry_pumps: pumps between two tries of a prefetch that waits for host pages while nothing was freed.
    """

    page_tokens: int = 64
    threshold_tokens: int = 256
    host_share: float = 0.5
    retry_pumps: int = 8

    def __post_init__(self) -> None:
        where = "prefetch budget"
        if self.page_tokens < 1:
            raise ConfigError(f"page_tokens is {self.page_tokens}", where, "write 1 or more")
        if self.threshold_tokens < self.page_tokens:
            raise ConfigError(
                f"threshold_tokens is {self.threshold_tokens}, below the page size",
                where,
                f"write {self.page_tokens} (one page) or more",
            )
        if not 0 < self.host_share <= 1:
            raise ConfigError(f"host_share is {self.host_share!r}", where, "write a share above 0, at most 1")
        if self.retry_pumps < 1:
            raise ConfigError(f"retry_pumps is {self.retry_pumps}", where, "write 1 or more")

    @property
    def threshold_pages(self) -> int:
        """Whole pages that reach the threshold."""
        return -(-self.threshold_tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class Grant:
    """Host pages for a hit, or None and the reason why not (yet); ``short_of`` also names what a shrunk one lacked."""

    pages: NDArray[np.int64] | None
    short_of: Outcome


class HostBudget:
    """Counts the host pages that prefetches hold and hands them out, hit-sized."""

    def __init__(self, settings: BudgetSettings, pool: HostPool) -> None:
        self.settings = settings
        self._pool = pool
        self._held = 0

    @property
    def held_pages(self) -> int:
        """Pages leased or draining."""
        return self._held

    @property
    def limit_pages(self) -> int:
        return max(1, int(self._pool.total_pages * self.settings.host_share))

    @property
    def signature(self) -> tuple[int, int]:
        """Changes when a prefetch that did not fit might fit now."""
        return (self._pool.free_pages, self._held)

    def grant(self, hit_pages: int, submitted_at: float) -> Grant:
        """Allocate ``hit_pages``, or what fits but at least the threshold.

        Host pages used since ``submitted_at`` are hotter than what the prefetch brings and are never evicted.
        """
        room = self.limit_pages - self._held
        least = min(self.settings.threshold_pages, hit_pages)
        if room < least:
            return Grant(None, Outcome.RATE_LIMITED)
        want = min(hit_pages, room)
        if self._pool.free_pages < want:
            self._pool.reclaim(want - self._pool.free_pages, submitted_at)
        free = self._pool.free_pages
        short_of = Outcome.RATE_LIMITED if room < free else Outcome.NO_HOST_PAGES
        want = min(want, free)
        pages = self._pool.alloc(want) if want >= least else None
        if pages is None:
            return Grant(None, short_of)
        if len(pages) != want:
            raise InvariantError(f"host pool gave {len(pages)} pages for {want}")
        self._held += want
        return Grant(pages, short_of)

    def hand_over(self, pages: int) -> None:
        """``pages`` of a lease now belong to the host tree."""
        self._drop(pages)

    def free(self, pages: NDArray[np.int64]) -> None:
        """Give pages back to the pool; no I/O may touch them any more."""
        if len(pages):
            self._drop(len(pages))
            self._pool.free(pages)

    def _drop(self, pages: int) -> None:
        if pages > self._held:
            raise InvariantError(f"{pages} host pages given back, {self._held} are held")
        self._held -= pages


class RetryPace:
    """Says when a prefetch that did not fit tries again: as soon as host pages were freed, or every few pumps.

    Counted in pumps, not seconds, because pumps are the same on every rank.
    """

    def __init__(self, every_pumps: int) -> None:
        self._every = every_pumps
        self._seen: tuple[int, int] | None = None
        self._due = 0

    def is_due(self, signature: tuple[int, int], pump: int) -> bool:
        """Ask before a try; a True answer counts as the try."""
        if signature == self._seen and pump < self._due:
            return False
        self._seen, self._due = signature, pump + self._every
        return True
