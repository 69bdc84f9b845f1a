"""Cold is proven, bytes are checked: the parts that make a benchmark honest."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from harness import (
    Arena,
    DeviceBytes,
    WarmRead,
    WrongBytes,
    drop_page_cache,
    page_keys,
    require_cold,
    require_cold_files,
    resident_share,
)
from measure.facts import mount_of


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    if mount_of(tmp_path).get("file_system") in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("needs a file system on a block device")
    path = tmp_path / "data.bin"
    path.write_bytes(np.random.default_rng(1).bytes(4 << 20))
    return path


def test_a_file_just_written_is_warm_and_is_refused(on_disk: Path) -> None:
    assert resident_share([on_disk]) > 0.9
    with pytest.raises(WarmRead, match="page cache"):
        require_cold_files([on_disk])


def test_dropping_the_page_cache_makes_it_cold(on_disk: Path) -> None:
    assert drop_page_cache([on_disk]) == "fadvise"
    assert require_cold_files([on_disk]) == 0.0


def test_a_cold_read_is_seen_on_the_device_and_a_warm_one_is_refused(on_disk: Path) -> None:
    drop_page_cache([on_disk])
    with DeviceBytes(on_disk) as cold:
        size = len(on_disk.read_bytes())
    require_cold(size, cold)
    with DeviceBytes(on_disk) as warm:
        on_disk.read_bytes()
    with pytest.raises(WarmRead, match="came from the device"):
        require_cold(size, warm)


def test_the_arena_has_the_page_first_shape() -> None:
    arena = Arena(8, 16384)
    regions = arena.regions(2, 5)
    assert regions.addrs.shape == (3, 2) and regions.sizes.tolist() == [8192, 8192]
    assert regions.is_aligned
    assert int(regions.addrs[1, 0] - regions.addrs[0, 0]) == 8192
    assert int(regions.addrs[0, 1] - regions.addrs[0, 0]) == 8 * 8192


@pytest.mark.parametrize("page_bytes", [16384, 1 << 20])
def test_stamps_show_swapped_stale_and_flipped_bytes(page_bytes: int) -> None:
    keys = page_keys(10, "a")
    arena = Arena(12, page_bytes)
    arena.stamp(keys, start=2)
    assert arena.wrong_pages(keys, start=2) == []
    assert arena.wrong_pages([keys[1], keys[0], *keys[2:]], start=2) == [0, 1]
    assert arena.wrong_pages(page_keys(10, "b"), start=2) == list(range(10))
    arena.halves[1, 2 + 7, 4097] ^= 1
    half = arena.halves[0, 2 + 3]
    half[:4096], half[4096:8192] = half[4096:8192].copy(), half[:4096].copy()
    assert arena.wrong_pages(keys, start=2) == [3, 7]
    with pytest.raises(WrongBytes, match="2 of 10 pages"):
        arena.require(keys, start=2)
    arena.blank()
    assert len(arena.wrong_pages(keys, start=2)) == 10


def test_keys_are_the_same_for_the_same_salt_only() -> None:
    assert page_keys(3, "a") == page_keys(3, "a")
    assert not set(page_keys(3, "a")) & set(page_keys(3, "b"))
    assert all(len(k) == 32 for k in page_keys(3, "a"))
    assert os.path.exists("/proc/self/io")
