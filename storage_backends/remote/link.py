"""What the parts of one RemoteStore share: the client, and everything that says when not to use it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_hicache_ext.arbiter import Arbiter, Traffic
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.ports import Clock
from sglang_hicache_ext.storage_backends.remote.breaker import (
    Breaker,
    BreakerState,
    NegativeCache,
    PeerBreakers,
    PutAdmission,
)
from sglang_hicache_ext.storage_backends.remote.client import ObjectClient
from sglang_hicache_ext.storage_backends.remote.direct import HostMemory
from sglang_hicache_ext.storage_backends.remote.lanes import LateError, WorkerGoneError
from sglang_hicache_ext.storage_backends.remote.transfer import Copier, Gate, Limits
from sglang_hicache_ext.storage_backends.remote.wire import ObjectNames

NAMES_PER_ASK = 1024
HISTORY_NAMES = 65_536
PAGES_PER_DEADLINE = 128
"""SGLang's own batch; a longer call gets proportionally more time."""
BLAME_TIMEOUT_S = 0.25


class NameHistory:
    """The names this process has seen in the store, the latest HISTORY_NAMES of them: tells EVICTED from ABSENT."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()

    def add(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._names[name] = None
            while len(self._names) > HISTORY_NAMES:
                self._names.popitem(last=False)

    def discard(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._names.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._names.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._names


class ArbiterGate:
    """The arbiter as one class of traffic passes it."""

    def __init__(self, arbiter: Arbiter, traffic: Traffic) -> None:
        self._arbiter, self._traffic = arbiter, traffic

    def enter(self, nbytes: int, deadline: float) -> bool:
        return self._arbiter.acquire(self._traffic, nbytes, deadline)

    def batch_pages(self, page_bytes: int) -> int:
        return self._arbiter.batch_pages(self._traffic, page_bytes)

    def leave(self, nbytes: int, seconds: float) -> None:
        self._arbiter.done(self._traffic, nbytes, seconds)


class Link:
    """Shared state of one store. Every part of it is thread-safe."""

    def __init__(
        self, config: HiCacheExtConfig, client: ObjectClient, names: ObjectNames, clock: Clock, metrics: Metrics,
        arbiter: Arbiter | None = None, host: HostMemory | None = None,
    ) -> None:  # fmt: skip
        self.config, self.client, self.names, self.clock, self.metrics = config, client, names, clock, metrics
        self.host = host
        """Host memory that Mooncake may write to itself; None unless ``remote_zero_copy`` is on."""
        self.read_gate: Gate | None = ArbiterGate(arbiter, Traffic.PREFETCH) if arbiter else None
        self.write_gate: Gate | None = ArbiterGate(arbiter, Traffic.BACKUP) if arbiter else None
        self.backend = Breaker(clock)
        self.peers = PeerBreakers(clock)
        self.negative = NegativeCache(clock)
        self.admission = PutAdmission(clock)
        self.history = NameHistory()
        self.copier = Copier(config.remote_copy_threads)

    def limits(self, pages: int, page_bytes: int, deadline_s: float | None, gate: Gate | None) -> Limits:
        each = self.config.remote_deadline_s
        total = each * max(1, -(-pages // PAGES_PER_DEADLINE)) if deadline_s is None else deadline_s
        batch_pages = 1 << 16 if gate is None else gate.batch_pages(page_bytes)
        return Limits(time.monotonic() + total, each, batch_pages, gate)

    def ask(self, op: str, *args: Any, timeout_s: float | None = None) -> Any | None:
        """A request that moves no page; None when the store cannot be asked. Keeps the backend's breaker."""
        if not self.backend.allow():
            return None
        try:
            reply = self.client.ask(timeout_s or self.config.remote_deadline_s, op, *args)
        except (LateError, WorkerGoneError):
            self.backend_failed()
            return None
        if isinstance(reply, list) and reply and all(isinstance(c, int) and c < 0 for c in reply):
            if op == "exist":
                self.backend_failed()
            return reply
        self.backend.success()
        return reply

    def backend_failed(self) -> None:
        self.metrics.add("remote_backend_failures")
        if self.backend.failure():
            self.metrics.add("remote_breaker_opened")

    def exist(self, names: Sequence[str], timeout_s: float | None = None) -> list[bool] | None:
        """Which names are in the store; None when it cannot be asked."""
        found: list[bool] = []
        for start in range(0, len(names), NAMES_PER_ASK):
            codes = self.ask("exist", list(names[start : start + NAMES_PER_ASK]), timeout_s=timeout_s)
            if codes is None:
                return None
            found += [c == 1 for c in codes]
        return found

    def is_willing(self, name: str) -> bool:
        """Whether transfers may go out now. A half-open breaker is probed with a query, which is cheap to lose."""
        if self.client.worker is None:
            return False
        if self.is_closed:
            return True
        return self.ask("exist", [name]) is not None and self.is_closed

    @property
    def is_closed(self) -> bool:
        """True while the backend's breaker lets calls through, the normal case."""
        return self.backend.state is BreakerState.CLOSED

    def peers_of(self, names: Sequence[str], timeout_s: float | None = None) -> list[set[str]]:
        """The nodes that hold each object; empty sets where unknown."""
        found: list[set[str]] = []
        for start in range(0, len(names), NAMES_PER_ASK):
            part = list(names[start : start + NAMES_PER_ASK])
            try:
                reply = self.client.ask(timeout_s or self.config.remote_deadline_s, "peers", part)
            except (LateError, WorkerGoneError):
                reply = [()] * len(part)
            found += [set(p) for p in reply]
        return found

    def blame(self, names: Sequence[str]) -> None:
        """Transfers of these pages ran late or failed: remember the pages, and who owns them."""
        self.negative.add(names)
        owners = self.peers_of(names, BLAME_TIMEOUT_S)
        suspects = set().union(*owners) if owners else set()
        if suspects:
            self.peers.blame(suspects)
        else:
            self.backend_failed()

    def unreadable(self, names: Sequence[str]) -> list[bool]:
        """For each name that exists, whether reading it is known to be futile now (only asked when something is wrong)."""
        hidden = self.negative.hidden(names)
        if not self.peers.any_blamed:
            return hidden
        refused = self.peers.refused()
        if not refused:
            return hidden
        owners = self.peers_of(names)
        return [h or bool(o and o <= refused) for h, o in zip(hidden, owners, strict=True)]
