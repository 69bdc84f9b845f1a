"""Page geometry: how many bytes a page has, in how many host regions, for every SGLang host layout.

Source: sglang 0.5.23 srt/mem_cache/pool_host/mha.py:305-341, 817-877 and mla.py:307-331, 1213-1337.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import ConfigError

ALIGN = 4096
"""Bytes. O_DIRECT alignment of every offset on disk; never less, also on 512-byte drives."""


class Layout(StrEnum):
    """SGLang's ``--hicache-mem-layout``."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"
    PAGE_HEAD = "page_head"


def align_up(nbytes: int, to: int = ALIGN) -> int:
    """Round ``nbytes`` up to a multiple of ``to``."""
    return -(-nbytes // to) * to


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Shape of one page of one rank's shard.

    Attributes:
        layout: host layout.
        page_tokens: tokens per page.
        layers: layers held by this rank.
        heads: KV heads of this rank; 1 for MLA.
        k_dim, v_dim: elements per head and token of K and V; ``v_dim == 0`` means one latent buffer (MLA).
        itemsize: bytes per element.
    """

    layout: Layout
    page_tokens: int
    layers: int
    heads: int
    k_dim: int
    v_dim: int
    itemsize: int

    def __post_init__(self) -> None:
        for name in ("page_tokens", "layers", "heads", "k_dim", "itemsize"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}", "PageGeometry")

    @property
    def region_sizes(self) -> tuple[int, ...]:
        """Bytes of each host region of a page, in the order SGLang hands them over."""
        per_layer = [self.page_tokens * self.heads * d * self.itemsize for d in (self.k_dim, self.v_dim) if d]
        if self.layout is Layout.LAYER_FIRST:
            return tuple(per_layer) * self.layers
        return tuple(b * self.layers for b in per_layer)

    @property
    def page_bytes(self) -> int:
        return sum(self.region_sizes)

    @property
    def stride_bytes(self) -> int:
        """Bytes of a page on disk: ``page_bytes`` rounded up to ALIGN."""
        return align_up(self.page_bytes)


@dataclass(frozen=True, slots=True)
class Regions:
    """Host memory of a batch of pages, as plain addresses.

    The caller owns the memory and keeps it alive until the call, and every drain it returned, is done.

    Attributes:
        addrs: [pages, regions] uint64, start address of each region.
        sizes: [regions] int64, bytes of each region; the same for every page.
        owner: anything that must stay referenced while the addresses are in use.
    """

    addrs: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    owner: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.addrs.ndim != 2 or self.addrs.shape[1] != len(self.sizes):
            raise ConfigError(f"addrs {self.addrs.shape} do not match {len(self.sizes)} region sizes", "Regions")

    def __len__(self) -> int:
        return len(self.addrs)

    @property
    def page_bytes(self) -> int:
        return int(self.sizes.sum())

    def slice(self, start: int, stop: int) -> Regions:
        return Regions(self.addrs[start:stop], self.sizes, self.owner)

    def take(self, pages: NDArray[np.int64] | list[int]) -> Regions:
        return Regions(self.addrs[np.asarray(pages, np.int64)], self.sizes, self.owner)

    @property
    def is_aligned(self) -> bool:
        """True when every region can be the target of O_DIRECT without a bounce (512-byte memory alignment)."""
        return not int(np.bitwise_or.reduce(self.addrs, axis=None)) % 512 and not (self.sizes % 512).any()


def check_rows(keys: Sequence[bytes], regions: Regions) -> None:
    """A store call has one row of regions for each key. Raises ValueError otherwise: a bug of the caller."""
    if len(keys) != len(regions):
        raise ValueError(f"{len(keys)} keys but {len(regions)} rows of regions")


def regions_of_array(array: NDArray[Any], region_sizes: tuple[int, ...] | None = None) -> Regions:
    """Regions over a contiguous [pages, page_bytes] uint8 array; each page cut into ``region_sizes``."""
    if array.dtype != np.uint8 or array.ndim != 2 or not array.flags.c_contiguous:
        raise ConfigError(
            f"need a contiguous [pages, bytes] uint8 array, got {array.dtype}{array.shape}", "regions_of_array"
        )
    sizes = np.asarray(region_sizes or (array.shape[1],), np.int64)
    if int(sizes.sum()) != array.shape[1]:
        raise ConfigError(
            f"region sizes sum to {int(sizes.sum())}, page has {array.shape[1]} bytes", "regions_of_array"
        )
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.uint64)
    base = np.uint64(array.ctypes.data) + np.arange(len(array), dtype=np.uint64) * np.uint64(array.shape[1])
    return Regions(base[:, None] + starts[None, :], sizes, array)
