"""Pages through the ring: batches in two halves, verified where they are delivered, bounded in time.

A read copies a slot to the host page and hashes *the host page*: what was proven is what is delivered, whatever may
still happen to the slot. A write hashes the slot, not the host page, for the same reason.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.storage_backends.record import PageDigests, memory_at, merge_columns, page_digest
from sglang_hicache_ext.storage_backends.remote import wire
from sglang_hicache_ext.storage_backends.remote.engine import NEVER_STARTED, NO_SPACE, NOT_FOUND, NOT_READY, RPC_FAILED
from sglang_hicache_ext.storage_backends.remote.lanes import Channel, Lane, LateError, WorkerGoneError
from sglang_hicache_ext.storage_backends.remote.ring import slot_bytes


class Gate(Protocol):
    """What a batch has to pass before it is sent: the arbiter."""

    def enter(self, nbytes: int, deadline: float) -> bool:
        """Block until the batch may go; False when ``deadline`` (time.monotonic) came first."""
        ...

    def batch_pages(self, page_bytes: int) -> int:
        """Pages per batch now."""
        ...

    def leave(self, nbytes: int, seconds: float) -> None:
        """The batch took ``seconds``."""
        ...


@dataclass
class PageJob:
    """The pages of one call, by position, as a lane works through them.

    Attributes:
        namespace, keys, names, regions: one row per page of the call.
        late, failed: positions that ran past the deadline; that failed in a way that may still move bytes.
        backend_failed: the master did not answer, or the worker ended.
        is_clean: False once anything may still move bytes in the lane's memory.
        settles_by: when not 0.0, the lane is only busy: what is in flight on it may take until then (time.monotonic).
    """

    namespace: bytes
    keys: Sequence[bytes]
    names: Sequence[str]
    regions: Regions
    late: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    backend_failed: bool = False
    is_clean: bool = True
    settles_by: float = 0.0

    def __post_init__(self) -> None:
        self.payload_bytes = self.regions.page_bytes
        self.object_bytes = wire.HEADER_BYTES + self.payload_bytes
        self.stride = slot_bytes(self.object_bytes)
        merged = merge_columns(self.regions)
        self.sizes = merged.sizes.tolist()
        self.addrs = merged.addrs.tolist()
        self.digests = PageDigests(self.namespace, self.keys, self.regions)

    def batches(self, rows: Sequence[int], lane: Lane, limit: int) -> list[Sequence[int]]:
        """Cut ``rows`` into batches that fit a half, of at most ``limit`` pages; at least two when that pipelines."""
        step = min(lane.ring.slots(self.object_bytes), limit, max(1, -(-len(rows) // 2)))
        return [rows[i : i + step] for i in range(0, len(rows), step)]

    def offsets(self, half: int, count: int) -> list[int]:
        return [half + i * self.stride for i in range(count)]


class Copier:
    """Runs a function over pages, on a few threads where there are cores for it. Copying and hashing release the lock."""

    def __init__(self, threads: int) -> None:
        count = threads or min(4, (os.cpu_count() or 1) // 4)
        self._pool = ThreadPoolExecutor(count, "hicache-ext-copy") if count > 1 else None
        self.threads = max(1, count)

    def run(self, one: Callable[[int], None], count: int) -> None:
        """Call ``one(i)`` for i in range(count); returns when all are done."""
        if self._pool is None or count < 2 * self.threads:
            for i in range(count):
                one(i)
            return

        def part(start: int) -> None:
            for i in range(start, count, self.threads):
                one(i)

        for future in [self._pool.submit(part, t) for t in range(self.threads)]:
            future.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class Limits:
    """Time and size of one call: absolute deadline, seconds per transfer, pages per batch, and the arbiter's gate."""

    deadline: float
    transfer_s: float
    batch_pages: int
    gate: Gate | None = None

    def admits(self, nbytes: int) -> bool:
        if self.gate is not None and not self.gate.enter(nbytes, self.deadline):
            return False
        return time.monotonic() < self.deadline


@dataclass
class _Flight:
    """One batch on its way: wait for it until ``wait_until``; past ``settles_by`` it counts as hung."""

    number: int
    started: float
    wait_until: float
    settles_by: float
    channel: Channel
    batch: Sequence[int]


def _pump(
    job: PageJob, rows: Sequence[int], lane: Lane, limits: Limits, op: str,
    stage: Callable[[Sequence[int], int], None] | None, land: Callable[[Sequence[int], int, list[int]], bool],
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Send ``rows`` in batches, one on each channel of the lane, and ``land`` the replies in order.

    Args:
        stage: fills a half before its batch is sent.
        land: takes a batch, its half and its codes; False stops further sending.

    Returns:
        Rows that were never sent, and rows whose reply did not come; ``job`` says what that means for the lane.
    """
    todo = deque(job.batches(rows, lane, limits.batch_pages))
    flying: deque[_Flight] = deque()
    free = deque(lane.channels)
    go_on = True

    def fill() -> None:
        while todo and free and go_on:
            if not limits.admits(len(todo[0]) * job.object_bytes):
                return
            batch, channel = todo.popleft(), free.popleft()
            if stage is not None:
                stage(batch, channel.half)
            flying.append(_take_off(job, channel, limits, op, batch))

    try:
        while todo or flying:
            fill()
            if not flying:
                break
            first = flying[0]
            codes = first.channel.receive(first.number, first.wait_until)
            flying.popleft()
            if limits.gate is not None:
                limits.gate.leave(len(first.batch) * job.object_bytes, time.monotonic() - first.started)
            go_on = land(first.batch, first.channel.half, codes) and go_on
            free.append(first.channel)
    except (LateError, WorkerGoneError) as error:
        job.is_clean = False
        job.backend_failed = job.backend_failed or isinstance(error, WorkerGoneError)
        if isinstance(error, LateError) and flying and time.monotonic() < flying[0].settles_by:
            job.settles_by = flying[-1].settles_by  # the caller's time is up, the transfer's is not
    return [r for batch in todo for r in batch], [r for f in flying for r in f.batch]


def _take_off(job: PageJob, channel: Channel, limits: Limits, op: str, batch: Sequence[int]) -> _Flight:
    names, sizes = [job.names[r] for r in batch], [job.object_bytes] * len(batch)
    now = time.monotonic()
    # Large batches one after the other: two at once cost more CPU than they save. Small ones at once: they are all latency.
    is_large = limits.gate is None
    number = channel.send(op, names, job.offsets(channel.half, len(batch)), sizes, in_turn=is_large)
    settles_by = now + limits.transfer_s
    return _Flight(number, now, min(limits.deadline, settles_by), settles_by, channel, batch)


def read_pages(
    job: PageJob, rows: Sequence[int], lane: Lane, limits: Limits, copier: Copier, out: list[Outcome | None]
) -> None:
    """Read pages ``rows`` of ``job`` through ``lane`` and set their outcomes; never raises for them."""

    def land(batch: Sequence[int], half: int, codes: list[int]) -> bool:
        _deliver(job, batch, codes, lane, half, copier, out)
        return True

    unsent, stranded = _pump(job, rows, lane, limits, "get", None, land)
    _note(job, stranded)
    for row in [*unsent, *stranded]:
        out[row] = Outcome.READ_ERROR if job.backend_failed else Outcome.LATE


def _note(job: PageJob, stranded: list[int]) -> None:
    """Blame the pages that are stranded, unless only the caller was in a hurry."""
    if job.backend_failed:
        job.failed.extend(stranded)
    elif not job.settles_by:
        job.late.extend(stranded)


def _deliver(
    job: PageJob, batch: Sequence[int], codes: list[int], lane: Lane, half: int, copier: Copier,
    out: list[Outcome | None],
) -> None:  # fmt: skip
    arrived = []
    for position, (row, code) in enumerate(zip(batch, codes, strict=True)):
        if code == job.object_bytes:
            arrived.append((row, lane.ring.base + half + position * job.stride))
        else:
            out[row] = refusal(job, row, code)

    def one(i: int) -> None:
        row, slot = arrived[i]
        out[row] = _copy_and_prove(job, row, slot)

    copier.run(one, len(arrived))


def refusal(job: PageJob, row: int, code: int) -> Outcome:
    """What an error code means for a page; notes what may still move bytes."""
    if code >= 0:
        return Outcome.MISMATCH  # an object of another length: stored by a writer with another idea of the page
    if code in (NOT_FOUND, NOT_READY):
        return Outcome.ABSENT
    if code in NEVER_STARTED:
        return Outcome.MISMATCH  # larger than a page should be: refused before it started
    job.failed.append(row)
    job.is_clean = False
    job.backend_failed = job.backend_failed or code <= RPC_FAILED
    return Outcome.READ_ERROR


def _copy_and_prove(job: PageJob, row: int, slot: int) -> Outcome:
    digest = wire.stored_digest(memory_at(slot, wire.HEADER_BYTES), job.namespace, job.payload_bytes)
    if digest is None:
        return Outcome.CORRUPT
    source = slot + wire.HEADER_BYTES
    for addr, size in zip(job.addrs[row], job.sizes, strict=True):
        ctypes.memmove(addr, source, size)
        source += size
    return Outcome.LOADED if job.digests.digest(row) == digest else Outcome.CORRUPT


def write_pages(
    job: PageJob, rows: Sequence[int], lane: Lane, limits: Limits, copier: Copier, out: list[WriteOutcome | None]
) -> None:
    """Write pages ``rows`` of ``job`` through ``lane`` and set their outcomes; stops at the first refusal for space."""

    def stage(batch: Sequence[int], half: int) -> None:
        _stage(job, batch, lane, half, copier)

    def land(batch: Sequence[int], half: int, codes: list[int]) -> bool:
        for row, code in zip(batch, codes, strict=True):
            out[row] = _written(job, row, code)
        return NO_SPACE not in codes

    unsent, stranded = _pump(job, rows, lane, limits, "put", stage, land)
    _note(job, stranded)
    for row in [*unsent, *stranded]:
        out[row] = WriteOutcome.WRITE_ERROR if job.backend_failed else WriteOutcome.LATE
    if WriteOutcome.FULL in out:
        for row in unsent:
            out[row] = WriteOutcome.FULL


def _stage(job: PageJob, batch: Sequence[int], lane: Lane, half: int, copier: Copier) -> None:
    def one(i: int) -> None:
        row, slot = batch[i], lane.ring.base + half + i * job.stride
        target = slot + wire.HEADER_BYTES
        for addr, size in zip(job.addrs[row], job.sizes, strict=True):
            ctypes.memmove(target, addr, size)
            target += size
        payload = memory_at(slot + wire.HEADER_BYTES, job.payload_bytes)
        digest = page_digest(job.namespace, job.keys[row], payload)
        memory_at(slot, wire.HEADER_BYTES)[:] = wire.encode_header(job.namespace, job.payload_bytes, digest)

    copier.run(one, len(batch))


def _written(job: PageJob, row: int, code: int) -> WriteOutcome:
    if code >= 0:
        return WriteOutcome.STORED
    if code == NO_SPACE:
        return WriteOutcome.FULL
    if code not in NEVER_STARTED:
        job.failed.append(row)
        job.is_clean = False
        job.backend_failed = job.backend_failed or code <= RPC_FAILED
    return WriteOutcome.WRITE_ERROR
