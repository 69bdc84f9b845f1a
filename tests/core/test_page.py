"""Page geometry against the piece counts that SGLang's host pools hand over."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.page import ALIGN, Layout, PageGeometry, Regions, align_up, regions_of_array


@pytest.mark.parametrize(
    ("layout", "v_dim", "regions"),
    [
        (Layout.PAGE_FIRST, 128, 2),
        (Layout.PAGE_FIRST_DIRECT, 128, 2),
        (Layout.PAGE_HEAD, 128, 2),
        (Layout.LAYER_FIRST, 128, 64),
        (Layout.PAGE_FIRST, 0, 1),
        (Layout.LAYER_FIRST, 0, 32),
        (Layout.PAGE_FIRST, 64, 2),
    ],
)
def test_regions_of_a_page(layout: Layout, v_dim: int, regions: int) -> None:
    g = PageGeometry(layout, page_tokens=64, layers=32, heads=8, k_dim=128, v_dim=v_dim, itemsize=2)
    assert len(g.region_sizes) == regions
    assert g.page_bytes == 64 * 32 * 8 * (128 + v_dim) * 2
    assert g.stride_bytes % ALIGN == 0
    assert 0 <= g.stride_bytes - g.page_bytes < ALIGN


def test_impossible_geometry_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_tokens must be positive"):
        PageGeometry(Layout.PAGE_FIRST, 0, 1, 1, 1, 1, 2)


def test_align_up() -> None:
    assert [align_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_regions_address_the_array_they_came_from() -> None:
    arena = np.arange(3 * 4096, dtype=np.uint8).reshape(3, 4096)
    r = regions_of_array(arena, (1024, 3072))
    assert len(r) == 3
    assert r.page_bytes == 4096
    assert int(r.addrs[2, 1]) == arena.ctypes.data + 2 * 4096 + 1024
    assert r.owner is arena
    assert int(r.slice(1, 2).addrs[0, 0]) == int(r.take([1]).addrs[0, 0]) == arena.ctypes.data + 4096


def test_alignment_is_told() -> None:
    sizes = np.array([512, 1024], np.int64)
    assert Regions(np.array([[4096, 8192]], np.uint64), sizes).is_aligned
    assert not Regions(np.array([[4096, 8200]], np.uint64), sizes).is_aligned
    assert not Regions(np.array([[4096, 8192]], np.uint64), np.array([512, 100], np.int64)).is_aligned


def test_regions_refuse_a_shape_that_does_not_match() -> None:
    with pytest.raises(ConfigError, match="do not match"):
        Regions(np.zeros((2, 3), np.uint64), np.zeros(2, np.int64))
    with pytest.raises(ConfigError, match="contiguous"):
        regions_of_array(np.zeros((4, 8), np.uint8)[:, ::2])
    with pytest.raises(ConfigError, match="sum to"):
        regions_of_array(np.zeros((4, 8), np.uint8), (1, 2))
