"""The pages of one load batch in one pool: where they come from, where they go, what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.ports import Drain, Namespace
from sglang_hicache_ext.sglang_adapter.linker_paths import LoadPath
from sglang_hicache_ext.sglang_adapter.linker_pools import DevicePool, concatenated
from sglang_hicache_ext.sglang_adapter.linker_quarantine import allocator_of, quarantine_of
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredPages, LayeredRead


class PoolLoad:
    """A ``linker_loads.Source`` over the store."""

    def __init__(
        self,
        pool: DevicePool,
        pages: LayeredPages,
        ns: Namespace | None,
        keys: list[bytes],
        slots: Sequence[torch.Tensor],
        path: LoadPath,
        allocator: Any,
    ) -> None:
        self._pool, self._pages, self._ns, self._keys = pool, pages, ns, keys
        self._slots, self._path, self._allocator = slots, path, allocator
        self._read: LayeredRead | None = None
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)

    def open(self, deadline: float) -> bool:
        if self._ns is None:
            return False
        self._rows = self._pool.rows(concatenated(self._slots), len(self._keys))
        self._read = self._pages.open(self._ns, self._keys, deadline, self._path.lanes)
        return self._read.is_loaded

    def layer(self, layer: int, deadline: float) -> tuple[bool, Drain | None]:
        assert self._read is not None
        result = self._path.read_layer(self._read, self._pool, layer, self._rows, deadline)
        if not result.is_loaded:
            self._read.fail(np.arange(len(self._rows)), result.codes)
        return result.is_loaded, result.drain

    def close(self) -> Sequence[Outcome]:
        if self._read is None:
            return ()
        outcomes = self._read.count()
        self._read = None
        return outcomes

    def quarantine(self, drain: Drain) -> None:
        pages = np.unique(self._rows // self._pool.page_tokens)
        quarantine_of(allocator_of(self._allocator, self._pool.name)).hold(pages, drain)
