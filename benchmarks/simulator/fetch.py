"""One prefetch from submission to its last byte, and the reads in flight of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.policy import OperationView
from sglang_hicache_ext.rates import RateMeter
from sglang_hicache_ext.scheduling import Batch, BatchSizes, FairPlan, LoadJob
from simulator.loop import EventLoop
from simulator.spec import NodeSpec
from simulator.storage import Storage
from simulator.trace import Request

_NO_MEMORY = regions_of_array(np.zeros((0, 1), np.uint8))


@dataclass(slots=True, eq=False)
class Fetch:
    """State of one prefetch. Pages count from ``start``, the first page that was not cached at submission.

    Attributes:
        requested: pages asked for.
        hit: pages that L3 has and the host has room for; None until the hit query is back.
        completed: leading pages that have arrived.
        arrived: all pages that have arrived, also those behind a gap and those that came too late.
        is_over: every page that will come has come, or there is nothing to come.
        is_stopped: the policy ended it.
        full_before_s: seconds in which no server was free, counted by the node, at the first blocked poll.
    """

    request: Request
    start: int
    requested: int
    submitted_at: float
    hit: int | None = None
    job: LoadJob | None = None
    completed: int = 0
    arrived: int = 0
    in_flight: int = 0
    held: int = 0
    held_at: float = 0.0
    is_over: bool = False
    is_stopped: bool = False
    first_blocked_at: float | None = None
    full_before_s: float = 0.0
    last_progress_at: float = 0.0
    gaps: dict[int, int] = field(default_factory=dict)

    @property
    def issued(self) -> int:
        """Pages handed to the I/O workers."""
        return 0 if self.job is None else self.job.next_page

    def view(
        self, ahead: int, fetch_pages_per_s: float, recompute_pages_per_s: float, others_waiting: int, busy_s: float
    ) -> OperationView:
        """What the policy may know."""
        return OperationView(
            self.requested,
            self.hit,
            self.completed,
            kv_done=self.is_over,
            first_blocked_at=self.first_blocked_at,
            last_progress_at=self.last_progress_at,
            pages_ahead=ahead,
            batch_pages=max(1, self.issued - self.arrived),
            fetch_pages_per_s=fetch_pages_per_s,
            recompute_pages_per_s=recompute_pages_per_s,
            others_waiting=others_waiting,
            busy_s=busy_s if self.first_blocked_at is not None else 0.0,
        )

    def arrive(self, offset: int, pages: int, now: float) -> None:
        """Count one batch; progress is published in planned order."""
        self.arrived += pages
        self.in_flight -= 1
        self.gaps[offset] = pages
        if self.is_stopped:
            return
        while self.completed in self.gaps:
            self.completed += self.gaps.pop(self.completed)
            self.last_progress_at = now


class InOrderPlan(FairPlan):
    """SGLang's own order: whole requests, first come, first served, in equal batches."""

    def take(self) -> Batch | None:
        if not self._jobs:
            return None
        job = self._jobs[0]
        batch = Batch(job, job.next_page, min(job.limit, job.next_page + self.sizes.most))
        job.next_page = batch.stop
        if batch.stop >= job.limit:
            self._jobs.pop(0)
        return batch

    def pages_ahead(self, job: LoadJob) -> int:
        return sum(j.limit - j.next_page for j in self._jobs if j.seq < job.seq)


class FetchQueue:
    """``io_workers`` workers that read batches in the order of the pipeline's own plan.

    Args:
        on_batch: told after each batch has arrived.
    """

    def __init__(
        self, loop: EventLoop, spec: NodeSpec, storage: Storage, page_tokens: int, on_batch: Callable[[Fetch], None]
    ) -> None:
        self._loop, self._storage, self._on_batch = loop, storage, on_batch
        most = max(1, spec.batch_tokens // page_tokens)
        sizes = BatchSizes(min(most, max(1, spec.first_batch_tokens // page_tokens)), most)
        self._plan = FairPlan(sizes) if spec.is_fair else InOrderPlan(sizes)
        self._page_bytes = float(page_tokens * spec.kv_bytes_per_token)
        self._idle_workers = spec.io_workers
        self._count = 0
        self.rate = RateMeter()

    def push(self, fetch: Fetch) -> None:
        self._count += 1
        fetch.job = LoadJob(fetch, self._count, (), _NO_MEMORY, fetch.hit or 0)
        self._plan.add(fetch.job)
        self._issue()

    def cut(self, fetch: Fetch) -> None:
        """Begin no further batch of ``fetch``."""
        if fetch.job is not None:
            self._plan.cut(fetch.job, 0)

    def pages_ahead(self, fetch: Fetch) -> int:
        """Pages of other requests that are read before the rest of ``fetch``."""
        return 0 if fetch.job is None else self._plan.pages_ahead(fetch.job)

    def _issue(self) -> None:
        while self._idle_workers:
            batch = self._plan.take()
            if batch is None:
                return
            self._idle_workers -= 1
            self._read(batch, self._loop.now)

    def _read(self, batch: Batch, started: float) -> None:
        fetch: Fetch = batch.job.tag
        fetch.in_flight += 1
        first = fetch.start + batch.start

        def arrived() -> None:
            self._idle_workers += 1
            self.rate.record(batch.pages, started, self._loop.now)
            fetch.arrive(batch.start, batch.pages, self._loop.now)
            self._on_batch(fetch)
            self._issue()

        self._storage.read(fetch.request.pages[first : first + batch.pages], self._page_bytes, arrived)
