"""The bodies of the query and I/O workers, and what they report to the owner.

Workers touch the store, the plan and the inbox; they never change an operation.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_hicache_ext.errors import InvariantError
from sglang_hicache_ext.executor import Executor
from sglang_hicache_ext.keys import key_bytes
from sglang_hicache_ext.operation import PrefetchOperation
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.ports import Clock, Namespace, PageStore, ReadResult
from sglang_hicache_ext.scheduling import Batch, FairPlan
from sglang_hicache_ext.trace import Trace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class QueryDone:
    """The hit query of one operation.

    Attributes:
        hit_pages: leading pages stored here.
        missing: outcome of each page behind them.
    """

    op: PrefetchOperation
    hashes: Sequence[str]
    keys: Sequence[bytes]
    hit_pages: int
    missing: Sequence[Outcome]


@dataclass(frozen=True, slots=True, eq=False)
class BatchDone:
    """One store call; ``result`` is None when the whole call failed. Times are Clock seconds."""

    batch: Batch
    result: ReadResult | None
    started_at: float
    ended_at: float


Event = QueryDone | BatchDone


class Inbox:
    """Events from workers to the owner. Workers stop taking work while it is full, so it is bounded."""

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        self._events: deque[Event] = deque()

    @property
    def is_full(self) -> bool:
        return len(self._events) >= self.limit

    def put(self, event: Event) -> None:
        self._events.append(event)

    def drain(self) -> list[Event]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events


class InFlight:
    """Store calls that run now, by worker: the source of ``oldest_inflight_seconds``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, tuple[float, str]] = {}

    def begin(self, worker: str, what: str, now: float) -> None:
        with self._lock:
            self._calls[worker] = (now, what)

    def end(self, worker: str) -> None:
        with self._lock:
            self._calls.pop(worker, None)

    def names(self) -> dict[str, str]:
        """Worker -> what it is in."""
        with self._lock:
            return {worker: what for worker, (_, what) in self._calls.items()}

    def oldest(self, now: float) -> tuple[float, str]:
        """Seconds and name of the oldest call; (0.0, "") when none runs."""
        with self._lock:
            if not self._calls:
                return 0.0, ""
            started, what = min(self._calls.values())
        return now - started, what


@dataclass(frozen=True, slots=True, eq=False)
class Workshop:
    """What the workers share."""

    store: PageStore
    ns: Namespace
    plan: FairPlan
    inbox: Inbox
    in_flight: InFlight
    executor: Executor
    clock: Clock
    queries: deque[PrefetchOperation]
    hold_s: float
    read_deadline_s: float
    trace: Trace | None

    def query_body(self) -> Iterator[bool]:
        """Answer hit queries, oldest first."""
        while True:
            op = self._next_query()
            if op is None:
                yield False
                continue
            started = self.clock.now()
            self.in_flight.begin("query", f"hit query of {op.rid}", started)
            try:
                done = yield from self.executor.call(self._query, op)
            except Exception as e:
                done = _failed_query(op, e)
            self.in_flight.end("query")
            self.inbox.put(done)
            if self.trace is not None:
                self.trace.span("query", str(op.rid), started, self.clock.now(), hit_pages=done.hit_pages)
            yield True

    def _next_query(self) -> PrefetchOperation | None:
        while self.queries and not self.inbox.is_full:
            op = self.queries.popleft()
            if not op.is_terminal:
                return op
        return None

    def _query(self, op: PrefetchOperation) -> QueryDone:
        hashes = op.request.hashes()
        if len(hashes) != op.request.pages:
            raise InvariantError(f"{len(hashes)} hashes for {op.request.pages} pages")
        keys = [key_bytes(h) for h in hashes]
        ns = op.request.ns or self.ns
        hit = self.store.hit_pages(ns, keys, self.hold_s)
        missing = [
            Outcome.HOLE if o is Outcome.LOADED else o
            for o in (self.store.why_absent(ns, keys[hit:]) if hit < len(keys) else ())
        ]
        return QueryDone(op, hashes, keys, hit, missing)

    def io_body(self, worker: str) -> Iterator[bool]:
        """Read batches in the plan's order."""
        while True:
            batch = None if self.inbox.is_full else self.plan.take()
            if batch is None:
                yield False
                continue
            yield True
            started = self.clock.now()
            self.in_flight.begin(worker, f"read of {batch.pages} pages for {batch.job.tag.rid}", started)
            result: ReadResult | None
            try:
                result = yield from self.executor.call(self._read, batch)
            except Exception as e:
                _log.warning("reading %d pages for %s failed: %s", batch.pages, batch.job.tag.rid, e)
                result = None
            ended = self.clock.now()
            self.in_flight.end(worker)
            self.inbox.put(BatchDone(batch, result, started, ended))
            if self.trace is not None:
                self.trace.span("io", str(batch.job.tag.rid), started, ended, start=batch.start, pages=batch.pages)
            yield True

    def _read(self, batch: Batch) -> ReadResult:
        job = batch.job
        keys = job.keys[batch.start : batch.stop]
        ns = job.tag.request.ns or self.ns
        return self.store.read(ns, keys, job.regions.slice(batch.start, batch.stop), self.read_deadline_s)


def _failed_query(op: PrefetchOperation, error: Exception) -> QueryDone:
    _log.warning("hit query of %s failed: %s", op.rid, error)
    return QueryDone(op, (), (), 0, [Outcome.READ_ERROR] * op.request.pages)
