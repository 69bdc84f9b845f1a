"""TieredStore: a near store (NVMe) in front of a far one (remote), composed through the PageStore protocol alone.

A hit is what the two together can serve; a read is split and both halves run side by side; a write is done when the near
tier has it, and goes on to the far tier in the background. One tier down is slower, never wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import StoreClosedError, StoreError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.page import Regions, check_rows
from sglang_hicache_ext.ports import Namespace, PageStore, ReadResult, StoreStats, WriteResult
from sglang_hicache_ext.storage_backends import open_store
from sglang_hicache_ext.storage_backends.tier_moves import Mover, SeenPages
from sglang_hicache_ext.storage_backends.tier_reads import BothDrains, SplitRead, gather

NEAR_IS_ROOMY = 0.9
"""Share of the near tier's capacity up to which any page is kept; above it, only from its second read on."""
QUERY_KEYS = 512
CLOSE_DRAIN_S = 5.0
"""How long ``close`` lets queued pages go on to the far tier."""
T = TypeVar("T")


class TieredStore:
    """A PageStore over two others, which it owns. Thread-safe.

    Args:
        config: ``remote_write_policy``, ``near_admission`` and ``remote_queue_pages`` are read here; without ``near``
            and ``far`` the NVMe store and the remote store are opened from it.
        near: fast and local; what it has is read from it.
        far: slower, shared.
    """

    def __init__(
        self, config: HiCacheExtConfig, *, near: PageStore | None = None, far: PageStore | None = None
    ) -> None:
        self._config = config
        self.near = near if near is not None else open_store(config, "nvme")
        try:
            self.far = far if far is not None else open_store(config, "rdma")
        except BaseException:
            self.near.close()
            raise
        self.metrics = Metrics()
        self.changes = getattr(self.near, "changes", None)  # of the near tier: the far one belongs to no node
        self._mover = Mover(self.near, self.far, self.metrics, config.remote_queue_pages)
        self._touched = SeenPages()
        self._reads = ThreadPoolExecutor(2 * config.remote_lanes, "hicache-ext-far-read")
        self._roomy_until, self._is_roomy = 0.0, True
        self._lock = threading.Lock()
        self._is_closed = False

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        self._check_open()
        self.far.namespace(fingerprint)
        return self.near.namespace(fingerprint)

    def _or_else(self, default: T, call: Callable[[], T]) -> T:
        """``call()``, or ``default`` when its whole tier fails; counted."""
        try:
            return call()
        except StoreError:
            self.metrics.add("tier_failures")
            return default

    def _masks(self, ns: Namespace, keys: Sequence[bytes]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """What the near tier has, and what only the far one has."""
        nothing = np.zeros(len(keys), np.bool_)
        near = self._or_else(nothing, lambda: self.near.contains(ns, keys))
        far = nothing.copy()
        missing = np.flatnonzero(~near)
        if len(missing):
            asked = [keys[i] for i in missing.tolist()]
            far[missing] = self._or_else(nothing[missing], lambda: self.far.contains(ns, asked))
        return near, far

    def contains(self, ns: Namespace, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        self._check_open()
        near, far = self._masks(ns, keys)
        return near | far

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        """The longest leading run that the two tiers together can serve; the far tier is asked only where the near ends."""
        self._check_open()
        hits = self._or_else(0, lambda: self.near.hit_pages(ns, keys, hold_s))
        while hits < len(keys):
            part = keys[hits : hits + QUERY_KEYS]
            near, far = self._masks(ns, part)
            both = near | far
            run = int(np.argmin(both)) if not both.all() else len(part)
            held = [part[i] for i in np.flatnonzero(near[:run]).tolist()]
            if held and hold_s:
                self._or_else(0, lambda held=held: self.near.hit_pages(ns, held, hold_s))  # type: ignore[misc]
            hits += run
            if run < len(part):
                break
        return hits

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        """Read each page from the nearest tier that has it, both tiers at once; what fails near gets a chance far."""
        self._check_call(keys, regions)
        started = time.monotonic()
        mask = self._or_else(np.zeros(len(keys), np.bool_), lambda: self.near.contains(ns, keys))
        near_rows, far_rows = np.flatnonzero(mask).tolist(), np.flatnonzero(~mask).tolist()
        reading = SplitRead(ns, keys, regions, deadline_s, self.metrics)
        far: Future[None] | None = None
        if near_rows and far_rows:
            far = self._reads.submit(reading.run, self.far, far_rows)
        elif far_rows:
            reading.run(self.far, far_rows)
        if near_rows:
            reading.run(self.near, near_rows)
        if far is not None:
            far.result()  # bounded by the far tier's own deadline; until then it may write to the caller's memory
        reading.second_chance(self.far, near_rows)
        reading.explain(self.near, far_rows)
        result = reading.result()
        self._after_read(ns, keys, regions, reading, near_rows)
        self.metrics.pages(result.outcomes)
        self.metrics.add("read_bytes", result.outcomes.count(Outcome.LOADED) * regions.page_bytes)
        self.metrics.observe("read_batch_seconds", time.monotonic() - started)
        return result

    def _after_read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, reading: SplitRead, near_rows: list[int]
    ) -> None:
        loaded = reading.loaded_from
        self.metrics.add("tier_near_pages", sum(t is self.near for t in loaded.values()))
        self.metrics.add("tier_far_pages", sum(t is self.far for t in loaded.values()))
        if self._config.remote_write_policy != "none":
            again = [keys[r] for r in near_rows if loaded.get(r) is self.near]
            self._mover.send(ns, again, regions.page_bytes)
        came = [r for r in sorted(loaded) if loaded[r] is self.far]
        self._mover.sent.add([(ns.id, keys[r]) for r in came])
        self._keep(ns, keys, regions, came)

    def _keep(self, ns: Namespace, keys: Sequence[bytes], regions: Regions, rows: list[int]) -> None:
        if not rows or self._config.near_admission == "none":
            return
        seen = self._touched.add([(ns.id, keys[r]) for r in rows])
        if self._config.near_admission == "second" and not self._near_has_room():
            rows = [r for r, before in zip(rows, seen, strict=True) if before]
        fits = self._mover.room_to_keep(regions.page_bytes)
        if rows[fits:]:
            self.metrics.add("tier_keep_dropped_pages", len(rows[fits:]))
        rows = rows[:fits]
        if rows:
            data = np.empty((len(rows), regions.page_bytes), np.uint8)
            for i, row in enumerate(rows):
                gather(regions, row, memoryview(data[i]))
            self._mover.keep(ns, [keys[r] for r in rows], data)

    def _near_has_room(self) -> bool:
        now = time.monotonic()
        if now >= self._roomy_until:
            stats = self.near.stats()
            self._is_roomy = stats.used_bytes < NEAR_IS_ROOMY * stats.capacity_bytes
            self._roomy_until = now + 1.0
        return self._is_roomy

    def write(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> WriteResult:
        """Write to the near tier now and to the far one in the background; what near refuses goes far at once."""
        self._check_call(keys, regions)
        started = time.monotonic()
        failed = WriteResult((WriteOutcome.WRITE_ERROR,) * len(keys))
        near = self._or_else(failed, lambda: self.near.write(ns, keys, regions, deadline_s))
        outcomes = list(near.outcomes)
        refused = [i for i, o in enumerate(outcomes) if not o.is_stored]
        drains = [near.drain] if near.drain is not None else []
        draining = list(near.draining)
        if self._config.remote_write_policy != "none" and refused:
            left = None if deadline_s is None else max(0.0, deadline_s - (time.monotonic() - started))
            some = [keys[i] for i in refused]
            skipped = WriteResult(tuple(outcomes[i] for i in refused))
            far = self._or_else(skipped, lambda: self.far.write(ns, some, regions.take(refused), left))
            for i, o in zip(refused, far.outcomes, strict=True):
                outcomes[i] = o if o.is_stored else outcomes[i]
            draining += [refused[i] for i in far.draining]
            drains += [far.drain] if far.drain is not None else []
        if self._config.remote_write_policy == "all":
            stored = [k for k, o in zip(keys, near.outcomes, strict=True) if o is WriteOutcome.STORED]
            self._mover.send(ns, stored, regions.page_bytes)
        self.metrics.writes(outcomes)
        self.metrics.add("written_bytes", outcomes.count(WriteOutcome.STORED) * regions.page_bytes)
        self.metrics.observe("write_batch_seconds", time.monotonic() - started)
        return WriteResult(tuple(outcomes), tuple(sorted(set(draining))), BothDrains(drains) if drains else None)

    def why_absent(self, ns: Namespace, keys: Sequence[bytes]) -> tuple[Outcome, ...]:
        """LOADED when either tier has the page, otherwise what the tier that knows more says."""
        self._check_open()
        near = self._or_else((Outcome.ABSENT,) * len(keys), lambda: self.near.why_absent(ns, keys))
        far = self._or_else((Outcome.ABSENT,) * len(keys), lambda: self.far.why_absent(ns, keys))
        order = (Outcome.LOADED, Outcome.MISMATCH, Outcome.EVICTED, Outcome.ABSENT)
        return tuple(min(n, f, key=order.index) for n, f in zip(near, far, strict=True))

    def remove(self, ns: Namespace, keys: Sequence[bytes]) -> int:
        self._check_open()
        gone = {(ns.id, k) for k in keys}
        with self._mover.paused(gone.__contains__):
            unique = list(dict.fromkeys(keys))
            there = int(self.contains(ns, unique).sum())
            self._or_else(0, lambda: self.near.remove(ns, unique))
            self._or_else(0, lambda: self.far.remove(ns, unique))
        return there

    def clear(self, ns: Namespace | None = None) -> int:
        self._check_open()
        with self._mover.paused(lambda ident: ns is None or ident[0] == ns.id):
            both = sum(int(self.far.contains(n, keys).sum()) for n, keys in self._near_pages(ns))
            return self._or_else(0, lambda: self.near.clear(ns)) + self._or_else(0, lambda: self.far.clear(ns)) - both

    def _near_pages(self, ns: Namespace | None) -> Iterator[tuple[Namespace, list[bytes]]]:
        """The keys of the near tier by namespace, where it can list them."""
        pages, spaces = getattr(self.near, "iter_pages", None), getattr(self.near, "namespaces", None)
        if pages is not None and spaces is not None:
            for each in [ns] if ns is not None else spaces():
                yield each, [key for key, _ in pages(each)]

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Until the near tier is durable and every queued page was offered to the far one; False on timeout."""
        self._check_open()
        deadline = time.monotonic() + timeout_s
        near = self.near.flush(timeout_s)
        moved = self._mover.wait_idle(max(0.0, deadline - time.monotonic()))
        return self.far.flush(max(0.0, deadline - time.monotonic())) and near and moved

    def stats(self) -> StoreStats:
        """Pages and bytes of the near tier; counters of all three parts, the tiers' own under "near_" and "far_"."""
        self._check_open()
        near, far = self.near.stats(), self.far.stats()
        self.metrics.set("tier_queued_pages", self._mover.queued_pages)
        snapshot = self.metrics.snapshot()
        counters = {**snapshot.counters, **snapshot.gauges}
        for prefix, stats in (("near_", near), ("far_", far)):
            counters.update({prefix + name: value for name, value in stats.counters.items()})
        return StoreStats(near.pages, near.used_bytes, near.capacity_bytes, counters)

    def describe(self) -> dict[str, Any]:
        c = self._config
        return {
            "store": "tiered", "near": self.near.describe(), "far": self.far.describe(),
            "remote_write_policy": c.remote_write_policy, "near_admission": c.near_admission,
            "queued_pages": self._mover.queued_pages,
        }  # fmt: skip

    def register_memory(self, addr: int, nbytes: int) -> bool:
        """Register host memory with the tiers that can; True when the near one did."""
        done = [s.register_memory(addr, nbytes) for s in (self.near, self.far) if hasattr(s, "register_memory")]
        return bool(done and done[0])

    def unregister_memory(self, addr: int) -> None:
        for store in (self.near, self.far):
            if hasattr(store, "unregister_memory"):
                store.unregister_memory(addr)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._mover.wait_idle(CLOSE_DRAIN_S)
        self._mover.close(10.0)
        self._reads.shutdown(wait=False, cancel_futures=True)
        self.near.close()
        self.far.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError("the tiered store is closed")

    def _check_call(self, keys: Sequence[bytes], regions: Regions) -> None:
        self._check_open()
        check_rows(keys, regions)
