"""Shared by the store tests: where to put stores, and which engines work on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

sys.path.insert(0, str(Path(__file__).parent))

Opener = Callable[..., NvmeStore]


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Opener]:
    """Open NVMe stores under the test's directory; all are closed at the end."""
    stores: list[NvmeStore] = []

    def open_one(name: str = "store", *, options: dict[str, Any] | None = None, **keys: Any) -> NvmeStore:
        raw = {"path": str(tmp_path / name), "capacity": "32MiB", "segment": "1MiB", "engine": "posix", **keys}
        store = NvmeStore(HiCacheExtConfig.parse(raw), **(options or {}))
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()
