"""Moving pages between two tiers in the background: bounded, droppable, never in anybody's way.

One thread. Pages on their way to the far tier are kept as keys only and read from the near tier when their turn comes; pages
to keep on the near tier are copies, because the host page they came from belongs to the caller. What does not fit is dropped
and counted: a tier is a cache, and a page that is read again gets its next chance.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.ports import Namespace, PageStore

logger = logging.getLogger(__name__)
Ident = tuple[bytes, bytes]
BATCH_BYTES = 16 << 20
KEEP_BYTES = 128 << 20
"""Copies of pages waiting to be kept on the near tier."""
DRAIN_S = 10.0


class SeenPages:
    """The latest ``limit`` pages that something was noted about. Thread-safe."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pages: OrderedDict[Ident, None] = OrderedDict()

    def add(self, idents: Sequence[Ident]) -> list[bool]:
        """Note the pages; for each, whether it had been noted before."""
        with self._lock:
            before = [i in self._pages for i in idents]
            for ident in idents:
                self._pages[ident] = None
                self._pages.move_to_end(ident)
            while len(self._pages) > self._limit:
                self._pages.popitem(last=False)
        return before

    def has(self, ident: Ident) -> bool:
        return ident in self._pages

    def forget(self, is_gone: Callable[[Ident], bool]) -> None:
        with self._lock:
            for ident in [i for i in self._pages if is_gone(i)]:
                del self._pages[ident]


@dataclass
class _Job:
    """Pages of one size to move; ``data`` is [pages, bytes] for pages to keep, None for pages to send."""

    ns: Namespace
    keys: list[bytes]
    page_bytes: int
    data: NDArray[np.uint8] | None = None


class Mover:
    """The background thread between ``near`` and ``far``, and its bounded queue."""

    def __init__(self, near: PageStore, far: PageStore, metrics: Metrics, limit_pages: int) -> None:
        self._near, self._far, self._metrics, self._limit = near, far, metrics, limit_pages
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._pages = self._keep_bytes = 0
        self._is_working = self._is_closed = False
        self._pauses = 0
        self._buffer: NDArray[np.uint8] | None = None
        self.sent = SeenPages()
        self._thread = threading.Thread(target=self._run, daemon=True, name="hicache-ext-tier")
        self._thread.start()

    def send(self, ns: Namespace, keys: Sequence[bytes], page_bytes: int) -> None:
        """Queue pages of the near tier for the far one, unless they are known to be there."""
        wanted = [k for k in dict.fromkeys(keys) if not self.sent.has((ns.id, k))]
        step = max(1, BATCH_BYTES // page_bytes)
        for start in range(0, len(wanted), step):
            self._put(_Job(ns, wanted[start : start + step], page_bytes), "tier_send_dropped_pages")

    def room_to_keep(self, page_bytes: int) -> int:
        """Pages of that size which may be queued by ``keep`` now."""
        return max(0, (KEEP_BYTES - self._keep_bytes) // page_bytes)

    def keep(self, ns: Namespace, keys: list[bytes], data: NDArray[np.uint8]) -> None:
        """Queue copies of pages for the near tier."""
        self._put(_Job(ns, keys, data.shape[1], data), "tier_keep_dropped_pages")

    def _put(self, job: _Job, dropped: str) -> None:
        with self._changed:
            nbytes = 0 if job.data is None else job.data.nbytes
            if self._is_closed or self._pages + len(job.keys) > self._limit or self._keep_bytes + nbytes > KEEP_BYTES:
                self._metrics.add(dropped, len(job.keys))
                return
            self._jobs.append(job)
            self._pages += len(job.keys)
            self._keep_bytes += nbytes
            self._changed.notify_all()

    @property
    def queued_pages(self) -> int:
        return self._pages

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until the queue is empty and nothing is moving; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._is_working, timeout_s)

    @contextmanager
    def paused(self, is_gone: Callable[[Ident], bool], timeout_s: float = 60.0) -> Iterator[None]:
        """Forget queued pages for which ``is_gone`` and start no move inside the block, so that none comes back."""
        with self._changed:
            self._pauses += 1
            for job in self._jobs:
                rows = [i for i, k in enumerate(job.keys) if not is_gone((job.ns.id, k))]
                self._pages -= len(job.keys) - len(rows)
                job.keys = [job.keys[i] for i in rows]
                job.data = None if job.data is None else job.data[rows]
            self._keep_bytes = sum(j.data.nbytes for j in self._jobs if j.data is not None)
            self.sent.forget(is_gone)
            self._changed.wait_for(lambda: not self._is_working, timeout_s)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if job.data is None:
                    self._send(job)
                else:
                    self._keep(job, job.data)
            except Exception as error:  # whatever a tier does wrong, the thread must live: it is the only one
                self._metrics.add("tier_move_errors")
                logger.warning("moving %d pages between tiers failed: %s", len(job.keys), error)
            finally:
                with self._changed:
                    self._is_working = False
                    self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._jobs and not self._pauses))
            if self._is_closed:
                return None
            job = self._jobs.popleft()
            self._pages -= len(job.keys)
            self._keep_bytes -= 0 if job.data is None else job.data.nbytes
            self._is_working = True
            return job

    def _send(self, job: _Job) -> None:
        there = self._far.contains(job.ns, job.keys)
        keys = [k for k, is_there in zip(job.keys, there.tolist(), strict=True) if not is_there]
        self.sent.add([(job.ns.id, k) for k, is_there in zip(job.keys, there.tolist(), strict=True) if is_there])
        if not keys:
            return
        data = self._buffer_for(len(keys), job.page_bytes)
        result = self._near.read(job.ns, keys, regions_of_array(data))
        if result.drain is not None and not result.drain.wait(DRAIN_S):
            self._buffer = None  # still being written to: leave it to the drain
        rows = [i for i, o in enumerate(result.outcomes) if o is Outcome.LOADED]
        wrote = self._far.write(job.ns, [keys[i] for i in rows], regions_of_array(data).take(rows))
        if wrote.drain is not None and not wrote.drain.wait(DRAIN_S):
            self._buffer = None
        stored = [(job.ns.id, keys[i]) for i, o in zip(rows, wrote.outcomes, strict=True) if o.is_stored]
        self.sent.add(stored)
        self._metrics.add("tier_sent_pages", len(stored))
        self._metrics.add("tier_send_refused_pages", len(rows) - len(stored))

    def _buffer_for(self, count: int, page_bytes: int) -> NDArray[np.uint8]:
        if self._buffer is None or self._buffer.nbytes < count * page_bytes:
            self._buffer = np.empty(count * page_bytes, np.uint8)
        return self._buffer[: count * page_bytes].reshape(count, page_bytes)

    def _keep(self, job: _Job, data: NDArray[np.uint8]) -> None:
        if not job.keys:
            return
        started = time.monotonic()
        wrote = self._near.write(job.ns, job.keys, regions_of_array(data))
        if wrote.drain is not None:
            wrote.drain.wait(DRAIN_S)
        self._metrics.add("tier_kept_pages", sum(o.is_stored for o in wrote.outcomes))
        self._metrics.observe("tier_keep_batch_seconds", time.monotonic() - started)
