"""The order in which I/O workers read: fair between requests, batch by batch.

Start-time fair queueing over pages: the request that got the fewest pages since it joined is next, ties go to the
older one. A new request joins at the pace of the slowest one, so it neither waits behind
a long one nor starves it. First batches are small, because only whole batches count as progress.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.page import Regions


@dataclass(slots=True, eq=False)
class LoadJob:
    """Pages [0, limit) of one prefetch that workers read. Changed under the plan's lock only.

    Attributes:
        tag: opaque to the plan; the pipeline's operation.
        next_page: first page that no worker took.
        in_flight: batches taken and not yet settled by the owner.
    """

    tag: Any
    seq: int
    keys: Sequence[bytes]
    regions: Regions
    limit: int
    next_page: int = 0
    in_flight: int = 0
    batches: int = 0
    served: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pages [start, stop) of a job; one store call."""

    job: LoadJob
    start: int
    stop: int

    @property
    def pages(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Pages per store call: ``first``, then doubling up to ``most``. SGLang uses 128 throughout."""

    first: int = 16
    most: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.most:
            raise ConfigError(
                f"first batch {self.first}, largest {self.most}", "batch sizes", "write 1 <= first <= most"
            )

    def of(self, batch: int) -> int:
        return min(self.most, self.first << min(batch, 20))


class FairPlan:
    """Jobs with pages left to read. Thread-safe; the lock is held for the choice only."""

    def __init__(self, sizes: BatchSizes) -> None:
        self.sizes = sizes
        self._lock = threading.Lock()
        self._jobs: list[LoadJob] = []
        self._pace = 0

    def add(self, job: LoadJob) -> None:
        with self._lock:
            job.served = self._pace
            self._jobs.append(job)

    def take(self) -> Batch | None:
        """Hand out the next batch, or None when nothing is left to read."""
        with self._lock:
            if not self._jobs:
                return None
            job = min(self._jobs, key=lambda j: (j.served, j.seq))
            stop = min(job.limit, job.next_page + self.sizes.of(job.batches))
            batch = Batch(job, job.next_page, stop)
            self._pace = job.served
            job.served += batch.pages
            job.next_page = stop
            job.batches += 1
            job.in_flight += 1
            if stop >= job.limit:
                self._jobs.remove(job)
            return batch

    def cut(self, job: LoadJob, limit: int) -> None:
        """Read no page of ``job`` at or behind ``limit`` that no worker took yet."""
        with self._lock:
            job.limit = min(job.limit, limit)
            if job.next_page >= job.limit and job in self._jobs:
                self._jobs.remove(job)

    def settle(self, batch: Batch) -> None:
        """The owner has seen the end of ``batch``."""
        with self._lock:
            batch.job.in_flight -= 1

    def pages_ahead(self, job: LoadJob) -> int:
        """Pages of other jobs that are read before the rest of ``job``, by the fair order."""
        with self._lock:
            rest = job.limit - job.next_page
            others = (
                min(j.limit - j.next_page, max(0, job.served + rest - j.served)) for j in self._jobs if j is not job
            )
            return sum(others)

    def pages_due(self, job: LoadJob, completed: int) -> int:
        """Pages behind ``completed`` that workers read now; of the next batch while there are none. At least 1."""
        with self._lock:
            in_flight = job.next_page - completed
            return max(1, in_flight or min(self.sizes.of(job.batches), job.limit - job.next_page))
