"""A PageStore made as slow as a latency model says, so that policies can be compared over real machinery."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import Clock, Namespace, PageStore, ReadResult, SystemClock
from sglang_hicache_ext.testing.latency import LatencyModel, describe


class SlowStore:
    """Wraps a store; a read returns when the inner read is done and the modelled time has passed.

    Transfers share one link of ``bandwidth_Bps`` first come, first served; the latency before it overlaps between
    callers. Writes, queries and everything else pass straight through. Thread-safe.

    Args:
        inner: the real store; owned, closed with this one.
        model: delays and bandwidth share over time, counted from construction.
        bandwidth_Bps: bytes per second; 0 for no limit.
        wait: blocks for the given seconds or until ``close``; tests put a fake here.
    """

    def __init__(
        self,
        inner: PageStore,
        model: LatencyModel,
        bandwidth_Bps: float = 0.0,
        *,
        clock: Clock | None = None,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._inner, self._model, self._bandwidth = inner, model, bandwidth_Bps
        self._clock = clock or SystemClock()
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._lock = threading.Lock()
        self._started = self._clock.now()
        self._link_free = self._started

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        """Read; pages whose modelled time passes ``deadline_s`` are LATE, all of the batch together."""
        if not keys:
            return self._inner.read(ns, keys, regions, deadline_s)
        started = self._clock.now()
        limit = float("inf") if deadline_s is None else started + deadline_s
        delay = self._model.delay_s(int.from_bytes(keys[0][:8], "little"), started - self._started)
        result = self._inner.read(ns, keys, regions, deadline_s)
        ready = started + delay
        self._wait_until(min(ready, limit))
        if ready <= limit:
            ready = self._through_link(max(ready, self._clock.now()), len(keys) * regions.page_bytes)
            self._wait_until(min(ready, limit))
        if ready <= limit:
            return result
        late = tuple(Outcome.LATE if o is Outcome.LOADED else o for o in result.outcomes)
        return ReadResult(late, result.draining, result.drain, max(result.late_s, ready - limit))

    def _wait_until(self, when: float) -> None:
        remaining = when - self._clock.now()
        if remaining > 0:
            self._wait(remaining)

    def _through_link(self, now: float, nbytes: int) -> float:
        """Queue a transfer behind those that reached the link before it; returns when it ends."""
        if not self._bandwidth:
            return now
        with self._lock:
            start = max(now, self._link_free)
            share = self._model.share(start - self._started)
            self._link_free = start + nbytes / (self._bandwidth * share)
            return self._link_free

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        return self._inner.namespace(fingerprint)

    def describe(self) -> dict[str, Any]:
        slow = {"model": describe(self._model), "bandwidth_Bps": self._bandwidth}
        return {**self._inner.describe(), "slowed": slow}

    def close(self) -> None:
        """Idempotent; wakes readers that wait out a modelled delay."""
        self._closing.set()
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
