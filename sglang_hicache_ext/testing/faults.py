"""Seeded faults of a store: what a drive, a network or a peer does on a bad day.

Whether a page or a call is struck depends on the seed and the page's key only, never on the order of calls, so a run
with threads meets the same faults again.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import ConfigError, StoreError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import Clock, Namespace, PageStore, ReadResult, StoreStats, SystemClock, WriteResult
from sglang_hicache_ext.testing.latency import uniform

_CALL, _PAGE, _LATE, _QUERY, _TIME, _WRITE = range(6)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Probabilities, each from 0 to 1. The default plan has no fault.

    Attributes:
        call_error: a whole read, query or write call raises StoreError.
        read_error: the device says no to a page.
        bit_flip: the bytes of a page come damaged; a self-proving store reports CORRUPT.
        late: a page outlives its call and is written ``late_s`` later.
        lost: as late, but it never completes until ``FaultyStore.let_lost_complete``.
        latency_s: (least, most) seconds of a call.
        dead_after_calls: the peer is gone from this call on; 0 never.
    """

    seed: int = 0
    call_error: float = 0.0
    read_error: float = 0.0
    bit_flip: float = 0.0
    late: float = 0.0
    lost: float = 0.0
    late_s: float = 0.5
    latency_s: tuple[float, float] = (0.0, 0.0)
    dead_after_calls: int = 0

    def __post_init__(self) -> None:
        for name in ("call_error", "read_error", "bit_flip", "late", "lost"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", "fault plan", "write a probability, 0 to 1")

    def strikes(self, kind: int, key: bytes, probability: float) -> bool:
        return probability > 0 and uniform(self.seed * 8 + kind, _number(key)) <= probability

    def call_s(self, key: bytes) -> float:
        low, high = self.latency_s
        return low + (high - low) * uniform(self.seed * 8 + _TIME, _number(key))


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


@dataclass(slots=True, eq=False)
class LateIo:
    """Pages that outlived their call; a Drain. The write happens when it is due, into whatever memory that is then."""

    write: Callable[[], object]
    settle: Callable[[], None]
    due: float
    is_lost: bool
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_done(self) -> bool:
        self.settle()
        return self.done

    def wait(self, timeout_s: float) -> bool:
        return self.is_done()

    def complete(self) -> None:
        with self.lock:
            if not self.done:
                self.write()
                self.done = True


class FaultyStore:
    """A PageStore that suffers a FaultPlan. ``settle`` lets late I/O that is due happen; reads and drains call it."""

    def __init__(
        self,
        inner: PageStore,
        plan: FaultPlan,
        clock: Clock | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.inner, self.plan = inner, plan
        self._clock = clock or SystemClock()
        self._sleep = time.sleep if sleep is None else sleep
        self._late: list[LateIo] = []
        self._lock = threading.Lock()
        self._calls = 0
        self._has_lost_end = False
        self.struck = 0

    def settle(self) -> None:
        """Complete the late I/O that is due. Any thread."""
        now = self._clock.now()
        with self._lock:
            due = [io for io in self._late if (self._has_lost_end or not io.is_lost) and io.due <= now]
            self._late = [io for io in self._late if io not in due]
        for io in due:
            io.complete()

    def let_lost_complete(self) -> None:
        """From now on lost I/O is only late."""
        self._has_lost_end = True

    @property
    def is_quiet(self) -> bool:
        """True when no late I/O is left."""
        return not self._late

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        self._begin("lookup", keys)
        return self.inner.hit_pages(ns, keys, hold_s)

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        self.settle()
        self._begin("read", keys)
        late = [i for i, k in enumerate(keys) if self._is_late(k)]
        now_rows = [i for i in range(len(keys)) if i not in set(late)]
        inner = self.inner.read(ns, [keys[i] for i in now_rows], regions.take(now_rows), deadline_s)
        outcomes = [Outcome.LATE] * len(keys)
        for row, outcome in zip(now_rows, inner.outcomes, strict=True):
            outcomes[row] = self._spoil(keys[row], regions.take([row]), outcome)
        self.struck += sum(o is not Outcome.LOADED for o in outcomes)
        if not late:
            return ReadResult(tuple(outcomes), inner.draining, inner.drain, inner.late_s)
        return ReadResult(tuple(outcomes), tuple(late), self._leave_late(ns, keys, regions, late))

    def _is_late(self, key: bytes) -> bool:
        return self.plan.strikes(_LATE, key, self.plan.late + self.plan.lost)

    def _leave_late(self, ns: Namespace, keys: Sequence[bytes], regions: Regions, late: list[int]) -> LateIo:
        late_keys, late_regions = [keys[i] for i in late], regions.take(late)
        is_lost = any(self.plan.strikes(_LATE, k, self.plan.lost) for k in late_keys)
        io = LateIo(
            lambda: self.inner.read(ns, late_keys, late_regions),
            self.settle,
            self._clock.now() + self.plan.late_s,
            is_lost,
        )
        with self._lock:
            self._late.append(io)
        return io

    def _spoil(self, key: bytes, regions: Regions, outcome: Outcome) -> Outcome:
        if outcome is not Outcome.LOADED:
            return outcome
        if self.plan.strikes(_PAGE, key, self.plan.read_error):
            return Outcome.READ_ERROR
        if self.plan.strikes(_PAGE, key, self.plan.read_error + self.plan.bit_flip):
            _flip_a_bit(regions)
            return Outcome.CORRUPT
        return outcome

    def _begin(self, operation: str, keys: Sequence[bytes]) -> None:
        self._calls += 1
        first = keys[0] if keys else b"\0" * 8
        seconds = self.plan.call_s(first)
        if seconds > 0:
            self._sleep(seconds)
        if self.plan.dead_after_calls and self._calls >= self.plan.dead_after_calls:
            raise StoreError(operation, "the peer is gone", errno=111, is_transient=True)
        kind = _QUERY if operation == "lookup" else _WRITE if operation == "write" else _CALL
        if self.plan.strikes(kind, first, self.plan.call_error):
            raise StoreError(operation, "injected failure", errno=5, is_transient=True)

    def write(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> WriteResult:
        self._begin("write", keys)
        return self.inner.write(ns, keys, regions, deadline_s)

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        return self.inner.namespace(fingerprint)

    def contains(self, ns: Namespace, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        return self.inner.contains(ns, keys)

    def why_absent(self, ns: Namespace, keys: Sequence[bytes]) -> tuple[Outcome, ...]:
        return self.inner.why_absent(ns, keys)

    def remove(self, ns: Namespace, keys: Sequence[bytes]) -> int:
        return self.inner.remove(ns, keys)

    def clear(self, ns: Namespace | None = None) -> int:
        return self.inner.clear(ns)

    def flush(self, timeout_s: float = 30.0) -> bool:
        return self.inner.flush(timeout_s)

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def describe(self) -> dict[str, Any]:
        return {**self.inner.describe(), "faults": repr(self.plan)}

    def close(self) -> None:
        self.inner.close()


def _flip_a_bit(regions: Regions) -> None:
    byte = ctypes.c_ubyte.from_address(int(regions.addrs[0, 0]))
    byte.value ^= 0x10
