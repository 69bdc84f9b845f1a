"""Host pages that the device may still write to are kept from SGLang's free list until it cannot any more.

One instance per host pool, put in front of its ``free``, ``alloc`` and ``clear``; it stays for the life of the pool,
so detaching and attaching a hundred times leaves one.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.ports import Drain

_ATTRIBUTE = "_hicache_ext_quarantine"


class Quarantine:
    """Thread-safe. ``held`` pages are neither in the pool's free list nor in SGLang's hands once freed there."""

    def __init__(self, pool: Any, page_tokens: int) -> None:
        self._pool, self._page_tokens = pool, page_tokens
        self._lock = threading.RLock()
        self._draining: list[tuple[Drain, set[int]]] = []
        self._waiting: set[int] = set()
        self._alloc, self._free, self._clear = pool.alloc, pool.free, pool.clear
        pool.alloc, pool.free, pool.clear = self.alloc, self.free, self.clear

    @property
    def held_pages(self) -> int:
        """Pages that may still be written to."""
        with self._lock:
            return len(self._held())

    def hold(self, slots: NDArray[np.int64], drain: Drain) -> None:
        """Withhold the pages that start at ``slots`` until ``drain`` is done."""
        with self._lock:
            self._draining.append((drain, {int(s) for s in slots}))

    def _held(self) -> set[int]:
        return set().union(*(pages for _, pages in self._draining))

    def release_drained(self) -> None:
        """Give back what SGLang freed meanwhile and no I/O can touch any more."""
        with self._lock:
            if not self._draining:
                return
            self._draining = [(d, pages) for d, pages in self._draining if not d.is_done()]
            ready = self._waiting - self._held()
            self._waiting -= ready
            if ready:
                self._free(self._tokens(ready))

    def alloc(self, *args: Any, **kwargs: Any) -> Any:
        self.release_drained()
        return self._alloc(*args, **kwargs)

    def free(self, indices: Any, *args: Any, **kwargs: Any) -> Any:
        """As the pool's own, but pages in quarantine come later. Returns the slots taken back, now or later."""
        if not self._draining:
            return self._free(indices, *args, **kwargs)
        self.release_drained()
        with self._lock:
            held = self._held()
            flat = indices.cpu().numpy()
            pages = flat - flat % self._page_tokens
            kept = np.isin(pages, np.fromiter(held, np.int64, len(held)))
            if not kept.any():
                return self._free(indices, *args, **kwargs)
            self._waiting.update(int(p) for p in np.unique(pages[kept]))
            if not kept.all():
                self._free(indices.cpu()[~kept], *args, **kwargs)
            return len(flat)

    def clear(self, *args: Any, **kwargs: Any) -> Any:
        """As the pool's own; pages in quarantine are taken out of the fresh free list again."""
        result = self._clear(*args, **kwargs)
        with self._lock:
            held = self._held()
            if held:
                self._take_out(held)
                self._waiting = set(held)
        return result

    def _take_out(self, pages: set[int]) -> None:
        import torch

        slots = self._tokens(pages)
        used = getattr(self._pool, "slot_used", None)  # Mamba's host pool keeps no such flags
        if used is not None:
            used[slots] = True
        keep = ~torch.isin(self._pool.free_slots, slots)
        self._pool.free_slots = self._pool.free_slots[keep]

    def _tokens(self, pages: set[int]) -> Any:
        import torch

        first = torch.tensor(sorted(pages), dtype=torch.int64)
        return (first[:, None] + torch.arange(self._page_tokens)[None, :]).reshape(-1)


def quarantine_of(pool: Any, page_tokens: int) -> Quarantine:
    """The quarantine of ``pool``; installed at the first call."""
    existing: Quarantine | None = getattr(pool, _ATTRIBUTE, None)
    if existing is None:
        existing = Quarantine(pool, page_tokens)
        setattr(pool, _ATTRIBUTE, existing)
    return existing
