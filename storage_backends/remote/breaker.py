"""When not to ask: circuit breakers, a negative cache and put admission. Pure decisions over a clock.

All of them are bounded, thread-safe and cost well under a microsecond while nothing is wrong.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum

from sglang_hicache_ext.ports import Clock


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Stops asking after ``threshold`` failures in a row; asks again, once, after a pause that doubles.

    Args:
        clock: time source.
        threshold: failures in a row that open it.
        first_s, longest_s: first and longest pause in seconds.
    """

    def __init__(self, clock: Clock, *, threshold: int = 3, first_s: float = 1.0, longest_s: float = 8.0) -> None:
        self._clock, self._threshold, self._first_s, self._longest_s = clock, threshold, first_s, longest_s
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._is_open = False
        self._is_probing = False
        self.times_opened = 0

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if not self._is_open:
                return BreakerState.CLOSED
            return BreakerState.HALF_OPEN if self._clock.now() >= self._retry_at else BreakerState.OPEN

    def allow(self) -> bool:
        """True when a call may go out. While half open one caller gets it; a probe that never reports costs one pause."""
        if not self._is_open:  # the usual case, without the lock
            return True
        with self._lock:
            if not self._is_open:
                return True
            now = self._clock.now()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._pause_s
            self._is_probing = True
            return True

    def success(self) -> None:
        if not self._is_open and not self._failures:
            return
        with self._lock:
            self._failures, self._is_open, self._is_probing, self._pause_s = 0, False, False, 0.0

    def failure(self) -> bool:
        """Count a failure; True when this one opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._is_open and not self._is_probing:  # a call from before it opened: no news
                return False
            if not self._is_open and self._failures < self._threshold:
                return False
            return self._open()

    def trip(self) -> bool:
        """Open at once; True when it was not open."""
        with self._lock:
            return self._open()

    def _open(self) -> bool:
        was_open, self._is_open, self._is_probing = self._is_open, True, False
        self._pause_s = min(self._longest_s, self._pause_s * 2 if self._pause_s else self._first_s)
        self._retry_at = self._clock.now() + self._pause_s
        self.times_opened += not was_open
        return not was_open


class PeerBreakers:
    """A breaker per store node. At most ``limit`` nodes are remembered, the least recently blamed goes first."""

    def __init__(self, clock: Clock, limit: int = 1024) -> None:
        self._clock, self._limit = clock, limit
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, Breaker] = OrderedDict()

    @property
    def any_blamed(self) -> bool:
        """False in the normal case, in which nobody needs to ask who owns a page."""
        return bool(self._peers)

    def blame(self, peers: Iterable[str]) -> None:
        """A transfer from one of ``peers`` failed. Alone it is shut off at once, in company on the second time."""
        names = set(peers)
        with self._lock:
            for name in names:
                breaker = self._peers.setdefault(name, Breaker(self._clock, threshold=2))
                self._peers.move_to_end(name)
                if len(names) == 1:
                    breaker.trip()
                else:
                    breaker.failure()
            while len(self._peers) > self._limit:
                self._peers.popitem(last=False)

    def forgive(self, peers: Iterable[str]) -> None:
        """A transfer from each of ``peers`` went well."""
        with self._lock:
            for name in peers:
                self._peers.pop(name, None)

    def shut_off(self, peers: Iterable[str]) -> set[str]:
        """Those of ``peers`` not to be asked now. A half-open one is let through, which takes its one probe."""
        with self._lock:
            return {name for name in set(peers) & self._peers.keys() if not self._peers[name].allow()}

    def blamed(self, peers: Iterable[str]) -> set[str]:
        """Those of ``peers`` that have not been forgiven."""
        with self._lock:
            return set(peers) & self._peers.keys()

    def refused(self) -> set[str]:
        """Nodes whose breaker is open now; takes no probe."""
        with self._lock:
            return {name for name, b in self._peers.items() if b.state is BreakerState.OPEN}

    def states(self) -> dict[str, str]:
        with self._lock:
            return {name: str(b.state) for name, b in self._peers.items()}


class NegativeCache:
    """Names that were listed but could not be read, for ``ttl_s`` seconds: a stale hit costs its time-out once."""

    def __init__(self, clock: Clock, *, limit: int = 65_536, ttl_s: float = 5.0) -> None:
        self._clock, self._limit, self._ttl_s = clock, limit, ttl_s
        self._lock = threading.Lock()
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, names: Iterable[str]) -> None:
        with self._lock:
            until = self._clock.now() + self._ttl_s
            for name in names:
                self._until[name] = until
                self._until.move_to_end(name)
            while len(self._until) > self._limit:
                self._until.popitem(last=False)

    def discard(self, names: Iterable[str]) -> None:
        if self._until:
            with self._lock:
                for name in names:
                    self._until.pop(name, None)

    def hidden(self, names: Sequence[str]) -> list[bool]:
        """For each name, whether to treat it as missing now."""
        if not self._until:
            return [False] * len(names)
        with self._lock:
            now = self._clock.now()
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            return [self._until.get(name, now) > now for name in names]

    def clear(self) -> None:
        with self._lock:
            self._until.clear()

    def __len__(self) -> int:
        return len(self._until)


class PutAdmission:
    """Backs off from a full pool: after a refusal no put goes out for a pause that doubles up to ``longest_s``."""

    def __init__(self, clock: Clock, *, first_s: float = 0.25, longest_s: float = 8.0) -> None:
        self._breaker = Breaker(clock, threshold=1, first_s=first_s, longest_s=longest_s)

    def allow(self) -> bool:
        return self._breaker.allow()

    def refused(self) -> None:
        self._breaker.failure()

    def accepted(self) -> None:
        self._breaker.success()

    @property
    def is_backing_off(self) -> bool:
        return self._breaker.state is BreakerState.OPEN
