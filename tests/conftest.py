"""For every test that reads through a store: each page asked for ended in exactly one outcome, so the outcomes sum up."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest


class Asked:
    """Pages handed to ``read`` of each store object, whole calls only: one that raises has no outcomes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pages: Counter[int] = Counter()
        self.stores: dict[int, Any] = {}

    def note(self, store: Any, pages: int) -> None:
        with self._lock:
            self.stores[id(store)] = store
            self.pages[id(store)] += pages

    def differing(self) -> list[str]:
        with self._lock:
            found = [(s, s.metrics.snapshot().pages_queried, self.pages[number]) for number, s in self.stores.items()]
        return [f"{type(s).__name__}: {o} outcomes, {pages} pages" for s, o, pages in found if o != pages]

    def check(self) -> None:
        """A read of a background thread may be between its books and ours: it gets a moment."""
        deadline = time.monotonic() + 2.0
        while self.differing() and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        assert self.differing() == []


@pytest.fixture(autouse=True)
def outcomes_sum_up_to_the_pages_queried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Holds for the memory, the NVMe and the tiered store, and for the direct linker's loads over the second."""
    from sglang_hicache_ext.storage_backends.memory import MemoryStore
    from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredRead
    from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
    from sglang_hicache_ext.storage_backends.tiered import TieredStore

    asked = Asked()

    def counting(read: Any) -> Any:
        @functools.wraps(read)
        def wrapped(self: Any, ns: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            result = read(self, ns, keys, *args, **kwargs)
            assert len(result.outcomes) == len(keys)
            asked.note(self, len(keys))
            return result

        return wrapped

    def counting_load(count: Any) -> Any:
        @functools.wraps(count)
        def wrapped(self: Any) -> Any:
            asked.note(self._store, len(self.keys))
            return count(self)

        return wrapped

    for store in (MemoryStore, NvmeStore, TieredStore):
        monkeypatch.setattr(store, "read", counting(store.read))
    monkeypatch.setattr(LayeredRead, "count", counting_load(LayeredRead.count))
    yield
    asked.check()
