"""What this process publishes and removes, in the order in which it became true; for tools and routers that follow a store.

Other processes on the same directory change it too: they are not heard here, only found by asking ``present_heads``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.ports import KeyChange, Namespace
from sglang_hicache_ext.storage_backends.nvme.index import Change, Index, split_key

Listener = Callable[[Sequence[KeyChange]], None]


class Changes:
    """Thread-safe. A listener runs on the thread that made the change, with the index's write lock held."""

    def __init__(self, index: Index, number_of: Callable[[Namespace], int]) -> None:
        self._index, self._number_of = index, number_of
        self._listeners: dict[int, Listener] = {}

    def watch(self, ns: Namespace, listener: Listener) -> None:
        """Tell ``listener`` of each page of ``ns`` from now on. It must be quick, must not raise, must not call the store."""
        self._listeners = {**self._listeners, self._number_of(ns): listener}
        self._index.listener = self._hear

    def unwatch(self) -> None:
        """Tell nobody any more."""
        self._index.listener = None
        self._listeners = {}

    def present_heads(self, ns: Namespace, heads: Sequence[bytes]) -> NDArray[np.bool_]:
        """[heads] bool: a page of ``ns`` whose key begins with these bytes is published, by whatever process."""
        return self._index.contains_heads(self._number_of(ns), heads)

    def _hear(self, changes: list[Change]) -> None:
        by_listener: dict[int, list[KeyChange]] = {}
        for full, is_stored in changes:
            number, key = split_key(full)
            if number in self._listeners:
                by_listener.setdefault(number, []).append((key, is_stored))
        for number, mine in by_listener.items():
            self._listeners[number](mine)
