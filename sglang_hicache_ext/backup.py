"""The write path: host pages -> store, in the background, without ever blocking the owner.

Pages that could not be written are remembered as holes, because one missing page hides all behind it; they are written
again on the next chance, when their bytes are in host memory and are offered again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.executor import Executor, ThreadExecutor
from sglang_hicache_ext.keys import key_bytes
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import WriteOutcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.pipeline_workers import InFlight
from sglang_hicache_ext.ports import Clock, Drain, HostPool, Namespace, PageStore, SystemClock
from sglang_hicache_ext.trace import Trace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackupSettings:
    """Bounds of the write path.

    Attributes:
        batch_pages: pages per store call.
        queue_pages: pages that may wait or be written at once; more are dropped.
        write_deadline_s: handed to the store with every write.
        holes: failed pages remembered, the oldest forgotten first.
    """

    batch_pages: int = 128
    queue_pages: int = 65_536
    write_deadline_s: float = 30.0
    holes: int = 4096

    def __post_init__(self) -> None:
        for name, low in (("batch_pages", 1), ("queue_pages", 1), ("holes", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}", "backup", f"write {low} or more")
        if not self.write_deadline_s > 0:
            raise ConfigError(f"write_deadline_s is {self.write_deadline_s!r}", "backup", "write seconds above 0")


@dataclass(slots=True, eq=False)
class _Job:
    keys: Sequence[bytes]
    regions: Regions
    on_release: Callable[[], None]
    outcomes: list[WriteOutcome] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)


class Backup:
    """Writes host pages to a store. Owner thread for every method; one worker beside it."""

    def __init__(
        self,
        store: PageStore,
        ns: Namespace,
        pool: HostPool,
        settings: BackupSettings | None = None,
        *,
        clock: Clock | None = None,
        executor: Executor | None = None,
        metrics: Metrics | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.settings = settings or BackupSettings()
        self.metrics = metrics or Metrics()
        self._store, self._ns, self._pool, self._trace = store, ns, pool, trace
        self._clock: Clock = clock or SystemClock()
        self._executor: Executor = executor or ThreadExecutor()
        self._queue: deque[_Job] = deque()
        self._done: deque[_Job] = deque()
        self._draining: list[_Job] = []
        self._pages = 0
        self._holes: OrderedDict[bytes, None] = OrderedDict()
        self._in_flight = InFlight()
        self._is_closed = False
        self._executor.add("hicache-backup", self._body)

    @property
    def pages_held(self) -> int:
        """Host pages that wait, are being written, or drain; never above ``queue_pages``."""
        return self._pages

    def submit(self, hashes: Sequence[str], pages: NDArray[np.int64], on_release: Callable[[], None]) -> bool:
        """Queue pages for writing; ``on_release`` is called by the owner once no I/O reads them any more.

        Under pressure the pages are dropped at once (False), counted, and remembered as holes.
        """
        keys = [key_bytes(h) for h in hashes]
        if self._is_closed or self._pages + len(keys) > self.settings.queue_pages:
            outcome = WriteOutcome.CLOSED if self._is_closed else WriteOutcome.FULL
            self.metrics.add("backup_dropped_pages", len(keys))
            self._settle(keys, [outcome] * len(keys))
            on_release()
            return False
        self._pages += len(keys)
        self._queue.append(_Job(keys, self._pool.regions(pages), on_release))
        self._executor.wake()
        return True

    def holes_in(self, hashes: Sequence[str]) -> list[int]:
        """Positions of pages that failed before and are worth offering again."""
        return [i for i, h in enumerate(hashes) if key_bytes(h) in self._holes] if self._holes else []

    def pump(self) -> int:
        """Take in what was written and release its host pages; returns the jobs that ended."""
        while self._done:
            job = self._done.popleft()
            self._settle(job.keys, job.outcomes)
            self._draining.append(job)
        ended = [j for j in self._draining if all(d.is_done() for d in j.drains)]
        self._draining = [j for j in self._draining if j not in ended]
        for job in ended:
            self._pages -= len(job.keys)
            job.on_release()
        self.metrics.set("backup_pages_held", self._pages)
        return len(ended)

    def close(self, timeout_s: float = 10.0) -> list[str]:
        """Drop what waits, end within ``timeout_s``; idempotent. Returns the calls that are still stuck."""
        self._is_closed = True
        while self._queue:
            job = self._queue.popleft()
            job.outcomes = [WriteOutcome.CLOSED] * len(job.keys)
            self._done.append(job)
        stuck = self._executor.stop(timeout_s)
        self.pump()
        return [f"{name}: {self._in_flight.names().get(name, 'ending')}" for name in stuck]

    def health(self) -> dict[str, Any]:
        """JSON-ready."""
        seconds, what = self._in_flight.oldest(self._clock.now())
        return {
            "pages_held": self._pages,
            "holes": len(self._holes),
            "oldest_inflight_seconds": seconds,
            "oldest_inflight": what,
        }

    def _settle(self, keys: Sequence[bytes], outcomes: Sequence[WriteOutcome]) -> None:
        self.metrics.writes(outcomes)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome.is_stored:
                self._holes.pop(key, None)
            elif self.settings.holes:
                self._holes[key] = None
        while len(self._holes) > self.settings.holes:
            self._holes.popitem(last=False)

    # -- worker -----------------------------------------------------------------------------------------------------

    def _body(self) -> Iterator[bool]:
        while True:
            try:
                job = self._queue.popleft()
            except IndexError:
                yield False
                continue
            for start in range(0, len(job.keys), self.settings.batch_pages):
                yield True
                stop = min(len(job.keys), start + self.settings.batch_pages)
                started = self._clock.now()
                self._in_flight.begin("hicache-backup", f"write of {stop - start} pages", started)
                try:
                    outcomes = yield from self._executor.call(self._write, job, start, stop)
                except Exception as e:
                    _log.warning("writing %d pages failed: %s", stop - start, e)
                    outcomes = [WriteOutcome.WRITE_ERROR] * (stop - start)
                self._in_flight.end("hicache-backup")
                job.outcomes.extend(outcomes)
                if self._trace is not None:
                    self._trace.span("backup", f"{stop - start} pages", started, self._clock.now())
            self._done.append(job)
            yield True

    def _write(self, job: _Job, start: int, stop: int) -> list[WriteOutcome]:
        """Write what is not there. Once the store is full, the rest of the chain is not offered any more."""
        if WriteOutcome.FULL in job.outcomes:
            return [WriteOutcome.FULL] * (stop - start)
        keys = job.keys[start:stop]
        missing = np.flatnonzero(~self._store.contains(self._ns, keys))
        outcomes = [WriteOutcome.PRESENT] * len(keys)
        if len(missing):
            rows = job.regions.slice(start, stop).take(missing)
            result = self._store.write(
                self._ns, [keys[i] for i in missing.tolist()], rows, self.settings.write_deadline_s
            )
            if result.drain is not None:
                job.drains.append(result.drain)
            for i, outcome in zip(missing.tolist(), result.outcomes, strict=True):
                outcomes[i] = outcome
        return outcomes
