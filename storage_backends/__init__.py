"""Page stores. ``open_store`` picks one by name and imports only what it needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.ports import PageStore

STORES = {
    "nvme": ("sglang_hicache_ext.storage_backends.nvme.store", "NvmeStore"),
    "rdma": ("sglang_hicache_ext.storage_backends.remote.store", "RemoteStore"),
    "tiered": ("sglang_hicache_ext.storage_backends.tiered", "TieredStore"),
    "memory": ("sglang_hicache_ext.storage_backends.memory", "MemoryStore"),
}
"""Store name -> (module, class). Literal: no name from outside ever becomes an import."""


def open_store(config: HiCacheExtConfig, name: str = "nvme", **options: Any) -> PageStore:
    """Open the store called ``name``. Raises ConfigError, CapabilityError or StoreError.

    Args:
        config: the whole config tree; each store reads its own keys.
        name: a key of ``STORES``.
        options: passed to the store's class (``engine``, ``engine_factory``, ``clock``).
    """
    if name not in STORES:
        raise ConfigError(f"unknown store {name!r}", "backend_name", f"write one of: {', '.join(sorted(STORES))}")
    module, cls = STORES[name]
    store: PageStore = getattr(import_module(module), cls)(config, **options)
    return store
