"""The seams of the package as Protocols: structural typing, no inheritance.

Threads: a PageStore is called from several threads at once and is safe for it. HostPool and
PrefixIndex belong to the owner thread (SGLang's scheduler, or a benchmark's loop).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.page import Regions


@dataclass(frozen=True, slots=True)
class Namespace:
    """A registered fingerprint. Cheap to pass around; equal ids mean equal fingerprints."""

    id: bytes
    fingerprint: Fingerprint


KeyChange = tuple[bytes, bool]
"""(key, True: published, False: removed)."""


class ChangeFeed(Protocol):
    """Follows the pages of a store on this node's drives; stores that have one offer it as ``changes``."""

    def watch(self, ns: Namespace, listener: Callable[[Sequence[KeyChange]], None]) -> None:
        """Tell ``listener`` of each page this process publishes or removes, in that order. It must not call the store."""
        ...

    def unwatch(self) -> None: ...

    def present_heads(self, ns: Namespace, heads: Sequence[bytes]) -> NDArray[np.bool_]:
        """Say for each ``heads`` whether a page is published whose key begins so; changes of other processes count."""
        ...


class Drain(Protocol):
    """I/O that outlived its call. Its host pages may still be written (read) until ``is_done``."""

    def is_done(self) -> bool:
        """True once no byte can move any more. Never blocks."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block at most ``timeout_s``; return ``is_done``."""
        ...


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Outcome per page, in the order asked.

    Attributes:
        outcomes: one per page. Only LOADED pages hold valid bytes; the memory of others is undefined.
        draining: positions of pages whose memory may still be written to; empty in the normal case.
        drain: tells when they are safe; None when ``draining`` is empty.
        late_s: seconds past the deadline when the call ended, 0.0 when in time.
    """

    outcomes: tuple[Outcome, ...]
    draining: tuple[int, ...] = ()
    drain: Drain | None = None
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Outcome per page, in the order asked. ``draining`` pages may still be read by the device."""

    outcomes: tuple[WriteOutcome, ...]
    draining: tuple[int, ...] = ()
    drain: Drain | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot. Byte figures count everything on disk, the index included.

    Attributes:
        pages: pages that can be found.
        used_bytes: bytes on disk at this instant; never above ``capacity_bytes``.
        counters: monotonic counters, name -> value (see metrics.py for the names).
    """

    pages: int
    used_bytes: int
    capacity_bytes: int
    counters: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class PageStore(Protocol):
    """A store of self-proving pages. Keys are raw KEY_BYTES-byte strings.

    Guaranteed by the caller: region memory stays alive until the call and its drain are done; two
    calls never target the same host memory at once.
    The implementer must: never deliver a byte that did not prove itself; never raise for a page
    (StoreError only when a whole call fails); bound every wait by the deadline; return one outcome
    per key, in order, also for zero keys; accept thousands of keys in one call.
    """

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        """Register ``fingerprint`` (idempotent) and return its handle."""
        ...

    def contains(self, ns: Namespace, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Say for each key whether a page is published. From memory: no system call per key."""
        ...

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        """Count the leading keys present; hold those pages against reclaim for ``hold_s`` seconds."""
        ...

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        """Read pages into ``regions`` (row i for key i), each verified before it counts as LOADED."""
        ...

    def write(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> WriteResult:
        """Write pages; a page is found by others only after its bytes are in place."""
        ...

    def why_absent(self, ns: Namespace, keys: Sequence[bytes]) -> tuple[Outcome, ...]:
        """Classify keys that ``contains`` denies: ABSENT, EVICTED or MISMATCH. LOADED where present."""
        ...

    def remove(self, ns: Namespace, keys: Sequence[bytes]) -> int:
        """Forget pages; returns how many were there."""
        ...

    def clear(self, ns: Namespace | None = None) -> int:
        """Forget every page of ``ns`` (all when None); safe while I/O runs. Returns how many."""
        ...

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Block until every accepted write is durable in the configured sense; False on timeout."""
        ...

    def stats(self) -> StoreStats: ...

    def describe(self) -> dict[str, Any]:
        """Requested and effective settings, JSON-ready."""
        ...

    def close(self) -> None:
        """Idempotent, bounded. Later calls raise StoreClosedError."""
        ...


class HostPool(Protocol):
    """SGLang's L2 pool as the pipeline sees it. Owner thread only. Pages are integers."""

    @property
    def total_pages(self) -> int: ...

    @property
    def free_pages(self) -> int: ...

    def alloc(self, pages: int) -> NDArray[np.int64] | None:
        """Return exactly ``pages`` page indices (a copy, never a view of a free list), or None."""
        ...

    def free(self, pages: NDArray[np.int64]) -> None: ...

    def reclaim(self, pages: int, unused_since: float) -> int:
        """Free up to ``pages`` pages of the host tree that nobody used since ``unused_since`` (Clock seconds).

        Only such pages are colder than what a prefetch brings. Returns how many became free; 0 is always legal.
        """
        ...

    def regions(self, pages: NDArray[np.int64]) -> Regions: ...


class PrefixIndex(Protocol):
    """The host radix tree as the pipeline sees it. Owner thread only."""

    def insert_host(self, handle: Any, pages: NDArray[np.int64], hashes: Sequence[str]) -> int:
        """Insert completed pages behind ``handle``'s anchor; returns the leading pages it already had."""
        ...


class RankSync(Protocol):
    """The collectives of a tensor-parallel group. Every rank makes the same calls in the same order."""

    def min(self, value: int) -> int: ...

    def max(self, value: int) -> int: ...

    def min_many(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Element-wise minimum of a [n] int64 vector; n is the same on every rank. Returns a new array."""
        ...


class NoRankSync:
    """A group of one."""

    def min(self, value: int) -> int:
        return value

    def max(self, value: int) -> int:
        return value

    def min_many(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return values.copy()


class Clock(Protocol):
    """Monotonic seconds. Tests drive it by hand."""

    def now(self) -> float: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()
