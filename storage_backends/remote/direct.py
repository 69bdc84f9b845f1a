"""Zero-copy reads: Mooncake writes straight into host pages. Off by default.

What it saves is one copy per page. What it risks: a transfer that fails or runs late may still write into host pages, and
the client cannot be killed because it lives in the serving process. Such pages are therefore reported as draining, the
client is given up at once, and the pages are safe only when it has ended, which takes Mooncake a minute on a hung node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import ReadResult
from sglang_hicache_ext.storage_backends.record import memory_at
from sglang_hicache_ext.storage_backends.remote import wire
from sglang_hicache_ext.storage_backends.remote.lanes import Lane, LateError, WorkerGoneError
from sglang_hicache_ext.storage_backends.remote.process import WorkerLife
from sglang_hicache_ext.storage_backends.remote.transfer import Limits, PageJob, refusal

MAX_PARTS = 4096
"""Pieces of memory in one request to the worker."""


class HostMemory:
    """The ranges of host memory that the caller has offered; registered with every client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, int] = {}

    def add(self, addr: int, nbytes: int) -> None:
        with self._lock:
            self._ranges[addr] = nbytes

    def discard(self, addr: int) -> None:
        with self._lock:
            self._ranges.pop(addr, None)

    def ranges(self) -> list[tuple[int, int]]:
        with self._lock:
            return list(self._ranges.items())

    def holds(self, regions: Regions) -> bool:
        """True when every region of every page lies in one of the ranges."""
        first = regions.addrs.min(axis=0).tolist() if len(regions) else []
        last = regions.addrs.max(axis=0).tolist() if len(regions) else []
        spans = [(a, b + size) for a, b, size in zip(first, last, regions.sizes.tolist(), strict=True)] if first else []
        return all(any(addr <= a and b <= addr + n for addr, n in self.ranges()) for a, b in spans)


class LifeDrain:
    """Done when a worker life has provably ended."""

    def __init__(self, worker: WorkerLife) -> None:
        self._worker = worker

    def is_done(self) -> bool:
        return self._worker.has_ended

    def wait(self, timeout_s: float) -> bool:
        return self._worker.kill(timeout_s)


def read_direct(job: PageJob, rows: Sequence[int], lane: Lane, limits: Limits, out: list[Outcome | None]) -> list[int]:
    """Read pages ``rows`` into their host memory and set their outcomes; returns rows that may still be written to."""
    most = max(1, min(limits.batch_pages, MAX_PARTS // (len(job.sizes) + 1), lane.ring.slots(wire.HEADER_BYTES)))
    draining: list[int] = []
    for start in range(0, len(rows), most):
        batch = rows[start : start + most]
        if not job.is_clean or not limits.admits(len(batch) * job.object_bytes):
            for row in batch:
                out[row] = Outcome.READ_ERROR if job.backend_failed else Outcome.LATE
            continue
        draining += _one_batch(job, batch, lane, limits, out)
    return draining


def _one_batch(job: PageJob, batch: Sequence[int], lane: Lane, limits: Limits, out: list[Outcome | None]) -> list[int]:
    channel = lane.channels[0]
    heads = [lane.ring.base + channel.half + i * wire.HEADER_BYTES for i in range(len(batch))]
    addrs = [[head, *job.addrs[row]] for head, row in zip(heads, batch, strict=True)]
    sizes = [[wire.HEADER_BYTES, *job.sizes]] * len(batch)
    deadline = min(limits.deadline, time.monotonic() + limits.transfer_s)
    try:
        codes = channel.receive(channel.send("get_parts", [job.names[r] for r in batch], addrs, sizes), deadline)
    except (LateError, WorkerGoneError) as error:
        job.is_clean = False
        job.backend_failed = isinstance(error, WorkerGoneError)
        (job.failed if job.backend_failed else job.late).extend(batch)
        for row in batch:
            out[row] = Outcome.READ_ERROR if job.backend_failed else Outcome.LATE
        return list(batch)
    failed_before = set(job.failed)
    for row, head, code in zip(batch, heads, codes, strict=True):
        out[row] = _prove(job, row, head) if code == job.object_bytes else refusal(job, row, code)
    return [r for r in job.failed if r not in failed_before]


def _prove(job: PageJob, row: int, head: int) -> Outcome:
    digest = wire.stored_digest(memory_at(head, wire.HEADER_BYTES), job.namespace, job.payload_bytes)
    return Outcome.LOADED if digest is not None and job.digests.digest(row) == digest else Outcome.CORRUPT


def with_draining(outcomes: tuple[Outcome, ...], rows: Sequence[int], worker: WorkerLife | None) -> ReadResult:
    """A result whose ``rows`` stay out of use until ``worker`` has ended."""
    if not rows or worker is None:
        return ReadResult(outcomes)
    return ReadResult(outcomes, tuple(sorted(rows)), LifeDrain(worker))
