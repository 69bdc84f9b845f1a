"""SGLang's host pools as plain addresses: token indices in, Regions out.

A pool's own ``get_page_buffer_meta`` is the authority. It is linear in the page number for every pool of SGLang 0.5.23,
so it is probed once and then computed for a whole batch with NumPy; a pool that is not linear is asked every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions

Slots = NDArray[np.int64]


class PoolPages(Protocol):
    """The pages of one host pool."""

    form: str
    page_tokens: int
    region_sizes: tuple[int, ...]

    def for_write(self, slots: Slots) -> Regions:
        """Regions that hold the pages starting at ``slots``."""
        ...

    def for_read(self, slots: Slots) -> Regions:
        """Regions to read the pages into; ``finish`` must follow."""
        ...

    def finish(self, slots: Slots, regions: Regions, outcomes: Sequence[Outcome]) -> None:
        """Bring the LOADED pages into the pool where ``for_read`` did not point into it."""
        ...


def page_slots(host_indices: Any, pages: int, page_tokens: int) -> Slots:
    """First token slot of each page.

    Args:
        host_indices: [pages * page_tokens] int64 CPU tensor, page-contiguous.

    Raises:
        ValueError: wrong length, or a page that is not contiguous and aligned.
    """
    if host_indices is None:
        raise ValueError(f"no host indices for {pages} pages")
    flat: Slots = host_indices.numpy() if hasattr(host_indices, "numpy") else np.asarray(host_indices)
    if len(flat) != pages * page_tokens:
        raise ValueError(f"{len(flat)} host indices for {pages} pages of {page_tokens} tokens")
    grid = flat.reshape(pages, page_tokens).astype(np.int64, copy=False)
    first = grid[:, 0]
    if (first % page_tokens).any() or (grid != first[:, None] + np.arange(page_tokens)).any():
        raise ValueError("host indices are not page-contiguous and page-aligned")
    return first


def open_pool(pool: Any, name: str) -> PoolPages | None:
    """Choose how to reach the pages of ``pool``; None for a logical pool without bytes.

    Raises:
        CapabilityError: neither addresses nor flat pages can be had from it.
    """
    if getattr(pool, "kv_buffer", pool) is None:
        return None
    try:
        return ZeroCopyPages(pool)
    except (NotImplementedError, ValueError, AttributeError) as no_addresses:
        try:
            return FlatPages(pool)
        except (NotImplementedError, ValueError, AttributeError) as no_flat:
            raise CapabilityError(
                f"host pool {name!r} ({type(pool).__name__}, layout {getattr(pool, 'layout', '?')}) gives no page addresses "
                f"({no_addresses}) and no flat pages ({no_flat})",
                "SGLang host pool",
                "start with --hicache-mem-layout page_first_direct",
            ) from no_flat


def _page_meta(pool: Any, page: int, page_tokens: int) -> tuple[list[int], list[int]]:
    import torch

    ptrs, sizes = pool.get_page_buffer_meta(torch.arange(page * page_tokens, (page + 1) * page_tokens))
    return [int(p) for p in ptrs], [int(s) for s in sizes]


class ZeroCopyPages:
    """Regions that point straight into the pool."""

    form = "regions"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        self.pages = max(1, int(pool.size) // self.page_tokens)
        base, sizes = _page_meta(pool, 0, self.page_tokens)
        self.region_sizes = tuple(sizes)
        self._sizes = np.asarray(sizes, np.int64)
        self._base = np.asarray(base, np.uint64)
        second = np.asarray(_page_meta(pool, min(1, self.pages - 1), self.page_tokens)[0], np.uint64)
        self._stride = second - self._base
        self.is_linear = all(self._agrees(page) for page in {self.pages // 2, self.pages - 1})

    def _agrees(self, page: int) -> bool:
        ptrs, sizes = _page_meta(self._pool, page, self.page_tokens)
        expected = self._base + np.uint64(page) * self._stride
        return tuple(sizes) == self.region_sizes and bool((np.asarray(ptrs, np.uint64) == expected).all())

    def for_write(self, slots: Slots) -> Regions:
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.pages * self.page_tokens:
            raise ValueError(f"host slot outside the pool of {self.pages} pages")
        numbers = (slots // self.page_tokens).astype(np.uint64)
        if self.is_linear:
            addrs = self._base[None, :] + numbers[:, None] * self._stride[None, :]
        else:
            rows = [_page_meta(self._pool, int(n), self.page_tokens)[0] for n in numbers]
            addrs = np.asarray(rows, np.uint64).reshape(len(numbers), len(self._sizes))
        return Regions(addrs, self._sizes, self._pool)

    for_read = for_write

    def finish(self, slots: Slots, regions: Regions, outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: the bytes are where they belong."""


class FlatPages:
    """Flat copies, for pools that give no addresses (DSA indexer and Mamba in ``layer_first``)."""

    form = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        page = pool.get_data_page(0, flat=True)
        self.region_sizes: tuple[int, ...] = (int(page.numel() * page.element_size()),)

    def for_write(self, slots: Slots) -> Regions:
        return self._over([self._pool.get_data_page(int(s), flat=True).contiguous() for s in slots])

    def for_read(self, slots: Slots) -> Regions:
        return self._over([self._pool.get_dummy_flat_data_page() for _ in slots])

    def _over(self, tensors: list[Any]) -> Regions:
        (nbytes,) = self.region_sizes
        if any(t.numel() * t.element_size() != nbytes or not t.is_contiguous() for t in tensors):
            raise ValueError(f"a flat page is not {nbytes} contiguous bytes")
        addrs = np.asarray([t.data_ptr() for t in tensors], np.uint64).reshape(len(tensors), 1)
        return Regions(addrs, np.asarray(self.region_sizes, np.int64), tensors)

    def finish(self, slots: Slots, regions: Regions, outcomes: Sequence[Outcome]) -> None:
        for slot, tensor, outcome in zip(slots, regions.owner, outcomes, strict=True):
            if outcome is Outcome.LOADED:
                self._pool.set_from_flat_data_page(int(slot), tensor)


def pool_buffers(pool: Any) -> list[tuple[int, int]]:
    """(address, bytes) of each host tensor of a pool, for registration with an I/O engine; [] when unknown."""
    get_buffers = getattr(pool, "get_hybrid_pool_buffer", None)
    tensors = get_buffers() if get_buffers is not None else [getattr(pool, "kv_buffer", None)]
    flat = [t for item in tensors for t in (item if isinstance(item, (list, tuple)) else [item]) if t is not None]
    return [(int(t.data_ptr()), int(t.numel() * t.element_size())) for t in flat]
