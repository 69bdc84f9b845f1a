"""SGLang's generic path: pages as flat tensors instead of addresses.

A flat page orders its bytes otherwise than the zero-copy regions do, so it has a namespace of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sglang_hicache_ext.keys import key_bytes
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import Namespace, PageStore
from sglang_hicache_ext.sglang_adapter.channel import PoolChannel


class GenericPages:
    """Flat pages of the KV pool. Thread-safe."""

    def __init__(self, channel: PoolChannel, store: PageStore) -> None:
        self._channel, self._store = channel, store

    def _namespace(self) -> Namespace:
        fingerprint = self._channel.namespace.fingerprint
        return self._store.namespace(replace(fingerprint, extra={**fingerprint.extra, "form": "flat"}))

    def read(self, keys: Sequence[str], tensors: Sequence[Any]) -> list[Any]:
        """Fill ``tensors``; returns each tensor, or None where its page is missing."""
        if not keys:
            return []
        result = self._store.read(self._namespace(), [key_bytes(k) for k in keys], _regions(tensors))
        return [t if o is Outcome.LOADED else None for t, o in zip(tensors, result.outcomes, strict=True)]

    def write(self, keys: Sequence[str], tensors: Sequence[Any]) -> bool:
        if not keys:
            return True
        flat = [t.contiguous() for t in tensors]
        result = self._store.write(self._namespace(), [key_bytes(k) for k in keys], _regions(flat))
        return all(o.is_stored for o in result.outcomes)

    def exists(self, key: str) -> bool:
        return bool(self._store.contains(self._namespace(), [key_bytes(key)])[0])


def _regions(tensors: Sequence[Any]) -> Regions:
    sizes = {t.numel() * t.element_size() for t in tensors}
    if len(sizes) != 1 or not all(t.is_contiguous() for t in tensors):
        raise ValueError("flat pages must be contiguous and of one size")
    addrs = np.asarray([t.data_ptr() for t in tensors], np.uint64).reshape(-1, 1)
    return Regions(addrs, np.asarray([sizes.pop()], np.int64), list(tensors))
