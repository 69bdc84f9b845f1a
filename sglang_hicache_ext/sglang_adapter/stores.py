"""The stores that a backend name chooses from, as SGLang's options see them."""

from __future__ import annotations

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import CapabilityError, ConfigError
from sglang_hicache_ext.ports import PageStore
from sglang_hicache_ext.storage_backends import STORES, open_store

TEST_ONLY = frozenset({"memory"})
"""Reached through ``dynamic`` only: its pages end with the process."""

CLI_NAMES = tuple(sorted(set(STORES) - TEST_ONLY))
"""Names that ``--hicache-storage-backend`` accepts."""


def open_named_store(name: str, config: HiCacheExtConfig) -> PageStore:
    """Open the store called ``name``.

    Raises:
        ConfigError: unknown name, or the store refuses the config.
        CapabilityError: the store's own requirements are not met.
    """
    if name not in STORES:
        known = ", ".join(map(repr, sorted(STORES)))
        raise ConfigError(
            f"backend_name is {name!r}", "--hicache-storage-backend-extra-config", f"write one of: {known}"
        )
    try:
        store: PageStore = open_store(config, name)
    except ImportError as error:
        raise CapabilityError(f"store {name!r} cannot be loaded: {error}", name, "install its requirements") from error
    return store
