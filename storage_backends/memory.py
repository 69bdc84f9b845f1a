"""The in-memory page store: the oracle of every test, with the meaning (not the speed) of the real ones."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import StoreClosedError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.page import Regions, align_up, check_rows
from sglang_hicache_ext.ports import Clock, Namespace, ReadResult, StoreStats, SystemClock, WriteResult
from sglang_hicache_ext.storage_backends.mismatch import difference
from sglang_hicache_ext.storage_backends.record import memory_at, page_digest

EVICTED_HISTORY = 65_536
"""Reclaimed keys remembered, so that EVICTED can be told from ABSENT."""

_Id = tuple[bytes, bytes]


@dataclass(slots=True)
class _Page:
    payload: bytearray
    digest: bytes
    held_until: float = -1.0
    was_read: bool = False


class MemoryStore:
    """A PageStore in a dict. Thread-safe; every call is one critical section, so it is linearisable.

    Pages are kept in insertion order; when full, the oldest page that is not held goes, unless it was read since
    (then it moves to the young end once), as the NVMe store does per segment.
    """

    def __init__(self, config: HiCacheExtConfig | None = None, *, clock: Clock | None = None) -> None:
        self._config = config or HiCacheExtConfig()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._pages: OrderedDict[_Id, _Page] = OrderedDict()
        self._namespaces: dict[bytes, Namespace] = {}
        self._evicted: OrderedDict[_Id, None] = OrderedDict()
        self._used = 0
        self._closed = False
        self.metrics = Metrics()

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        with self._open():
            ns = Namespace(fingerprint.namespace_id, fingerprint)
            return self._namespaces.setdefault(ns.id, ns)

    def namespaces(self) -> list[Namespace]:
        """Every namespace ever registered here."""
        with self._open():
            return list(self._namespaces.values())

    def iter_pages(self, ns: Namespace) -> Iterator[tuple[bytes, int]]:
        """(key, bytes) of each page of ``ns``, from a snapshot."""
        with self._open():
            found = [(key, len(p.payload)) for (nid, key), p in self._pages.items() if nid == ns.id]
        return iter(found)

    def contains(self, ns: Namespace, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        with self._open():
            return np.fromiter(((ns.id, k) in self._pages for k in keys), np.bool_, len(keys))

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        with self._open():
            until = self._clock.now() + hold_s
            for n, key in enumerate(keys):
                page = self._pages.get((ns.id, key))
                if page is None:
                    return n
                page.held_until = max(page.held_until, until)
            return len(keys)

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        check_rows(keys, regions)
        started = self._clock.now()
        with self._open():
            outcomes = tuple(self._read_one(ns, key, regions, row) for row, key in enumerate(keys))
        self.metrics.pages(outcomes)
        loaded = sum(o is Outcome.LOADED for o in outcomes)
        self.metrics.add("read_bytes", loaded * regions.page_bytes)
        self.metrics.observe("read_batch_seconds", self._clock.now() - started)
        return ReadResult(outcomes)

    def _read_one(self, ns: Namespace, key: bytes, regions: Regions, row: int) -> Outcome:
        page = self._pages.get((ns.id, key))
        if page is None:
            return self._why(ns, key)[0]
        if len(page.payload) != regions.page_bytes:
            return Outcome.MISMATCH
        if page_digest(ns.id, key, memoryview(page.payload)) != page.digest:
            self._drop((ns.id, key))
            return Outcome.CORRUPT
        source = (ctypes.c_char * len(page.payload)).from_buffer(page.payload)
        start = ctypes.addressof(source)
        for addr, size in zip(regions.addrs[row].tolist(), regions.sizes.tolist(), strict=True):
            ctypes.memmove(addr, start, size)
            start += size
        page.was_read = True
        return Outcome.LOADED

    def write(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> WriteResult:
        check_rows(keys, regions)
        started = self._clock.now()
        with self._open():
            self._namespaces.setdefault(ns.id, ns)
            outcomes = tuple(self._write_one(ns, key, regions, row) for row, key in enumerate(keys))
        self.metrics.writes(outcomes)
        self.metrics.add("written_bytes", outcomes.count(WriteOutcome.STORED) * regions.page_bytes)
        self.metrics.observe("write_batch_seconds", self._clock.now() - started)
        return WriteResult(outcomes)

    def _write_one(self, ns: Namespace, key: bytes, regions: Regions, row: int) -> WriteOutcome:
        ident, nbytes = (ns.id, key), regions.page_bytes
        old = self._pages.get(ident)
        if old is not None and len(old.payload) == nbytes:
            return WriteOutcome.PRESENT
        if old is not None:
            self._drop(ident)
        if not self._make_room(align_up(nbytes)):
            return WriteOutcome.FULL
        payload = bytearray()
        for addr, size in zip(regions.addrs[row].tolist(), regions.sizes.tolist(), strict=True):
            payload += memory_at(addr, size)
        self._pages[ident] = _Page(payload, page_digest(ns.id, key, memoryview(payload)))
        self._used += align_up(nbytes)
        self._evicted.pop(ident, None)
        return WriteOutcome.STORED

    def _make_room(self, nbytes: int) -> bool:
        now = self._clock.now()
        for ident in list(self._pages) if self._used + nbytes > self._config.capacity else ():
            page = self._pages[ident]
            if page.held_until >= now:
                continue
            if page.was_read and self._config.reinsert:
                page.was_read = False
                self._pages.move_to_end(ident)
                continue
            self._evict(ident)
            if self._used + nbytes <= self._config.capacity:
                return True
        if self._used + nbytes > self._config.capacity:  # everything was read: the second chance is used up
            for ident in [i for i, p in self._pages.items() if p.held_until < now]:
                self._evict(ident)
                if self._used + nbytes <= self._config.capacity:
                    break
        return self._used + nbytes <= self._config.capacity

    def _evict(self, ident: _Id) -> None:
        self._drop(ident)
        self.metrics.add("reclaimed_pages")
        self._evicted[ident] = None
        if len(self._evicted) > EVICTED_HISTORY:
            self._evicted.popitem(last=False)

    def _drop(self, ident: _Id) -> None:
        self._used -= align_up(len(self._pages.pop(ident).payload))

    def why_absent(self, ns: Namespace, keys: Sequence[bytes]) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome, _ in self.explain(ns, keys))

    def explain(self, ns: Namespace, keys: Sequence[bytes]) -> list[tuple[Outcome, str]]:
        """``why_absent`` with one sentence per key; a MISMATCH names the differing fields."""
        with self._open():
            return [(Outcome.LOADED, "present") if (ns.id, k) in self._pages else self._why(ns, k) for k in keys]

    def _why(self, ns: Namespace, key: bytes) -> tuple[Outcome, str]:
        if (ns.id, key) in self._evicted:
            return Outcome.EVICTED, "stored once, reclaimed since"
        for other in self._namespaces.values():
            if other.id != ns.id and (other.id, key) in self._pages:
                told = difference(ns.fingerprint, other.fingerprint)
                if told is not None:
                    return Outcome.MISMATCH, told
        return Outcome.ABSENT, "never stored, or forgotten"

    def remove(self, ns: Namespace, keys: Sequence[bytes]) -> int:
        with self._open():
            there = [(ns.id, k) for k in dict.fromkeys(keys) if (ns.id, k) in self._pages]
            for ident in there:
                self._drop(ident)
            return len(there)

    def clear(self, ns: Namespace | None = None) -> int:
        with self._open():
            gone = [i for i in self._pages if ns is None or i[0] == ns.id]
            for ident in gone:
                self._drop(ident)
            for ident in [i for i in self._evicted if ns is None or i[0] == ns.id]:
                del self._evicted[ident]
            return len(gone)

    def flush(self, timeout_s: float = 30.0) -> bool:
        with self._open():
            return True

    def stats(self) -> StoreStats:
        with self._open():
            counters = self.metrics.snapshot().counters
            return StoreStats(len(self._pages), self._used, self._config.capacity, counters)

    def describe(self) -> dict[str, Any]:
        return {"store": "memory", "capacity_bytes": self._config.capacity, "durability": "none"}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._pages.clear()
            self._used = 0

    def _open(self) -> _OpenSection:
        return _OpenSection(self)


class _OpenSection:
    """The store's lock, refused once the store is closed."""

    __slots__ = ("_store",)

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store._lock.acquire()
        if self._store._closed:
            self._store._lock.release()
            raise StoreClosedError("the memory store is closed")

    def __exit__(self, *exc: object) -> None:
        self._store._lock.release()
