"""Device pages that a read may still write to stay out of the allocator's free list until it cannot any more."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hicache_ext.ports import Drain

_ATTRIBUTE = "_hicache_ext_quarantine"


def allocator_of(allocator: Any, pool_name: str) -> Any:
    """The allocator of one pool: hybrid SWA allocators have two."""
    own = getattr(allocator, "swa_attn_allocator" if pool_name == "swa" else "full_attn_allocator", None)
    return own if own is not None else allocator


def can_quarantine(allocator: Any) -> bool:
    """Whether the allocator frees pages through the one method that the quarantine stands in front of.

    Source: sglang 0.5.23 srt/mem_cache/allocator/paged.py:375-400.
    """
    return hasattr(allocator, "_release_page_ids") and hasattr(allocator, "clear")


class DeviceQuarantine:
    """Scheduler thread only. Withheld pages count as available, so that SGLang's leak check is right about the rest."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._draining: list[tuple[Drain, set[int]]] = []
        self._waiting: set[int] = set()
        self._release, self._clear, self._size = allocator._release_page_ids, allocator.clear, allocator.available_size
        allocator._release_page_ids, allocator.clear = self.release, self.clear
        allocator.available_size = self.available_size

    @property
    def held(self) -> set[int]:
        return set().union(*(pages for _, pages in self._draining))

    def hold(self, pages: NDArray[np.int64], drain: Drain) -> None:
        """Withhold page numbers until ``drain`` is done."""
        self._draining.append((drain, {int(p) for p in pages}))

    def release(self, *page_ids: torch.Tensor) -> None:
        self.give_back()
        if not self._draining:
            if page_ids:
                self._release(*page_ids)
            return
        held = self.held
        for ids in page_ids:
            flat = ids.cpu().numpy()
            kept = np.isin(flat, np.fromiter(held, np.int64, len(held)))
            self._waiting.update(int(p) for p in flat[kept])
            if not kept.all():
                self._release(ids[torch.from_numpy(~kept).to(ids.device)])

    def give_back(self) -> None:
        """Free what SGLang freed meanwhile and no read can touch any more."""
        self._draining = [(d, pages) for d, pages in self._draining if not d.is_done()]
        ready = self._waiting - self.held
        self._waiting -= ready
        if ready:
            self._release(torch.tensor(sorted(ready), dtype=torch.int64, device=self._allocator.device))

    def available_size(self) -> int:
        if self._draining or self._waiting:
            self.give_back()
        return int(self._size()) + len(self._waiting) * int(self._allocator.page_size)

    def clear(self) -> None:
        """As the allocator's own; pages still held are taken out of the fresh free list again."""
        self._clear()
        self._waiting.clear()
        self._draining = [(d, pages) for d, pages in self._draining if not d.is_done()]
        held = self.held
        if held:
            free = self._allocator.free_pages
            keep = ~torch.isin(free, torch.tensor(sorted(held), dtype=free.dtype, device=free.device))
            self._allocator.free_pages = free[keep]
            self._waiting = held


def quarantine_of(allocator: Any) -> DeviceQuarantine:
    """The quarantine of ``allocator``; installed at the first call."""
    existing: DeviceQuarantine | None = getattr(allocator, _ATTRIBUTE, None)
    if existing is None:
        existing = DeviceQuarantine(allocator)
        setattr(allocator, _ATTRIBUTE, existing)
    return existing
