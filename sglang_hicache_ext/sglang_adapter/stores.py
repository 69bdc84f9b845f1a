"""The table of stores that a backend name chooses from. A new store is one row."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import CapabilityError, ConfigError
from sglang_hicache_ext.ports import PageStore

Opener = Callable[[HiCacheExtConfig], PageStore]

STORES: dict[str, tuple[str, str]] = {
    "nvme": ("sglang_hicache_ext.storage_backends.nvme", "open_store"),
    "memory": ("sglang_hicache_ext.storage_backends.memory", "MemoryStore"),
}
"""Backend name -> (module, callable that opens a store from a config). ``memory`` is for tests."""

CLI_NAMES = ("nvme",)
"""Names that ``--hicache-storage-backend`` accepts."""


def open_named_store(name: str, config: HiCacheExtConfig) -> PageStore:
    """Open the store called ``name``.

    Raises:
        ConfigError: unknown name, or the store refuses the config.
        CapabilityError: the store's own requirements are not met.
    """
    if name not in STORES:
        raise ConfigError(f"backend_name is {name!r}", "extra config", f"write one of: {', '.join(map(repr, STORES))}")
    module, attribute = STORES[name]
    try:
        opener = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise CapabilityError(
            f"store {name!r} cannot be loaded: {error}", module, "install its requirements"
        ) from error
    return cast(Opener, opener)(config)
