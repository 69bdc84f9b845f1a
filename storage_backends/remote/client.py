"""The object client: one worker life at a time, rebuilt in the background when too much of it is quarantined.

Threads: any. Rebuilding happens on one thread of its own; calls in the meantime are refused at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.ports import Clock
from sglang_hicache_ext.storage_backends.remote.breaker import Breaker
from sglang_hicache_ext.storage_backends.remote.lanes import Lane, LanePool, WorkerGoneError
from sglang_hicache_ext.storage_backends.remote.process import StartError, WorkerLife

KILL_TIMEOUT_S = 5.0
MAX_UNDEAD = 3
"""Workers that would not die (stuck in the kernel). Each keeps its ring; after this many no further one is started."""


class ObjectClient:
    """Leases lanes of the current worker and replaces it.

    Args:
        start: starts a worker; raises StartError.
        drain_s: how long calls on healthy lanes of a condemned worker may still take.
    """

    def __init__(
        self, start: Callable[[], WorkerLife], clock: Clock, metrics: Metrics, *, drain_s: float = 2.0
    ) -> None:
        self._start, self._metrics, self._drain_s = start, metrics, drain_s
        self._lock = threading.Lock()
        self._worker: WorkerLife | None = None
        self._undead: list[WorkerLife] = []
        self._rebuilding: threading.Thread | None = None
        self._restarts = Breaker(clock, threshold=1, first_s=0.5, longest_s=8.0)
        self._is_closed = False
        self._counted = 0
        self.last_error = ""
        self.rebuild_s = 0.0
        """Seconds the last rebuild took."""

    def connect(self) -> None:
        """Start the first worker on the calling thread. Raises StartError."""
        self._worker = self._start()
        self._metrics.set("remote_up", 1)

    @property
    def worker(self) -> WorkerLife | None:
        """The worker in use, or None while there is none. Kicks a rebuild when one is due."""
        worker = self._worker
        if worker is None:
            self._rebuild_when_due()
        return worker

    @property
    def is_up(self) -> bool:
        return self._worker is not None

    def lease(self, deadline: float, *, for_write: bool = False) -> tuple[LanePool, Lane] | None:
        worker = self.worker
        if worker is None:
            return None
        lane = worker.pool.lease(deadline, for_write=for_write)
        self._look_after(worker.pool)
        return None if lane is None else (worker.pool, lane)

    def give_back(
        self, pool: LanePool, lane: Lane, *, is_clean: bool, for_write: bool = False, settles_by: float = 0.0
    ) -> None:
        """End a lease; half of the lanes quarantined condemns the worker."""
        pool.give_back(lane, is_clean=is_clean, for_write=for_write, settles_by=settles_by)
        if not is_clean:
            self._look_after(pool)

    def _look_after(self, pool: LanePool) -> None:
        worker = self._worker
        if worker is None or worker.pool is not pool:
            return  # an earlier life, given up already
        with self._lock:
            fresh = pool.quarantined - self._counted
            self._counted = pool.quarantined
        if fresh:
            self._metrics.add("remote_quarantined_lanes", fresh)
        if not worker.is_alive():
            self.condemn(worker, "the worker ended")
        elif pool.quarantined * 2 >= pool.quarantined + pool.usable_lanes:
            self.condemn(worker, "half of the lanes are quarantined")

    def ask(self, timeout_s: float, op: str, *args: Any) -> Any:
        """One request that moves no page. Raises LateError, WorkerGoneError."""
        worker = self.worker
        if worker is None:
            raise WorkerGoneError(self.last_error or "the worker is being rebuilt")
        try:
            return worker.pool.ask(time.monotonic() + timeout_s, op, *args)
        except WorkerGoneError:
            if not worker.is_alive():
                self.condemn(worker, "the worker ended")
            raise

    def condemn(self, worker: WorkerLife, reason: str) -> None:
        """Give ``worker`` up, if it is still the current one, and replace it in the background. Never blocks."""
        with self._lock:
            if self._worker is not worker or self._is_closed:
                return
            self._worker, self._counted = None, 0
            self.last_error = reason
            self._metrics.add("remote_rebuilds")
            self._metrics.set("remote_up", 0)
            self._run_rebuild(worker)

    def _rebuild_when_due(self) -> None:
        with self._lock:
            busy = self._rebuilding is not None and self._rebuilding.is_alive()
            if self._worker is None and not busy and not self._is_closed and self._restarts.allow():
                self._run_rebuild(None)

    def _run_rebuild(self, old: WorkerLife | None) -> None:
        self._rebuilding = threading.Thread(target=self._rebuild, args=(old,), daemon=True, name="hicache-ext-rebuild")
        self._rebuilding.start()

    def _rebuild(self, old: WorkerLife | None) -> None:
        started = time.monotonic()
        if old is not None:
            self._retire(old)
        self._undead = [w for w in self._undead if not w.kill(0.0)]
        try:
            if len(self._undead) >= MAX_UNDEAD:
                raise StartError(f"{len(self._undead)} earlier workers will not end")
            fresh = self._start()
        except StartError as error:
            self.last_error = str(error)
            self._restarts.failure()
            return
        self._restarts.success()
        with self._lock:
            if not self._is_closed:
                self._worker, self.rebuild_s = fresh, time.monotonic() - started
                self._metrics.set("remote_up", 1)
                return
        fresh.kill(KILL_TIMEOUT_S)

    def _retire(self, worker: WorkerLife) -> None:
        worker.pool.close(self._drain_s)
        if not worker.kill(KILL_TIMEOUT_S):
            self._undead.append(worker)

    def describe(self) -> dict[str, Any]:
        worker = self._worker
        return {
            "is_up": worker is not None,
            "last_error": self.last_error,
            "last_rebuild_s": round(self.rebuild_s, 3),
            "quarantined_lanes": worker.pool.quarantined if worker else 0,
            "workers_that_will_not_end": len(self._undead),
            **(worker.info if worker else {}),
        }

    def close(self, timeout_s: float = KILL_TIMEOUT_S) -> bool:
        """Idempotent, bounded. True when nothing of any worker can still move a byte."""
        with self._lock:
            self._is_closed = True
            worker, self._worker = self._worker, None
            rebuilding = self._rebuilding
        if rebuilding is not None:
            rebuilding.join(timeout_s + self._drain_s)
        if worker is not None:
            self._retire(worker)
        self._undead = [w for w in self._undead if not w.kill(0.0)]
        self._metrics.set("remote_up", 0)
        return not self._undead and (rebuilding is None or not rebuilding.is_alive())
