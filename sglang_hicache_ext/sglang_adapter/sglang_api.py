"""The names of SGLang that the adapter uses, fetched when they are needed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def storage_metrics() -> Any:
    """The class StorageMetrics, from where this SGLang keeps it."""
    try:
        from sglang.srt.observability.metrics_collector import StorageMetrics
    except ImportError:
        from sglang.srt.metrics.collector import StorageMetrics
    return StorageMetrics


@lru_cache(maxsize=1)
def hicache_storage() -> Any:
    """The module that defines the storage contract."""
    from sglang.srt.mem_cache import hicache_storage as module

    return module


def next_operation_id() -> int:
    """Id that SGLang will give to the next storage operation of this process."""
    from sglang.srt.managers.cache_controller import StorageOperation

    return int(StorageOperation.counter)
