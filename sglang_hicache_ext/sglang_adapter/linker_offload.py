"""Offloads: device pages are copied out once the forward wrote them, headed, and stored; bounded, in order, no waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.ports import Drain, Namespace
from sglang_hicache_ext.sglang_adapter.linker_paths import Slot
from sglang_hicache_ext.sglang_adapter.linker_pools import DevicePool
from sglang_hicache_ext.sglang_adapter.linker_sums import layer_sums
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredPages

logger = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20
MAX_DRAINING = 4
"""Staging buffers that late writes may keep before offloads are declined."""


@dataclass(frozen=True)
class OffloadPart:
    """The pages of one node in one pool."""

    pool: DevicePool
    pages: LayeredPages
    ns: Namespace
    keys: list[bytes]
    slots: torch.Tensor


@dataclass(eq=False)
class OffloadJob:
    """``result`` is None until the job ended; results are handed to SGLang in the order of the jobs."""

    parts: list[OffloadPart]
    events: Sequence[Any]
    result: bool | None = None
    is_cancelled: bool = False
    pages: int = field(default=0)


class OffloadQueue:
    """``offer``, ``completed``, ``pop`` and ``cancel_all`` belong to the scheduler thread; one thread writes.

    Pages are copied out of the device before anything else is done with them: the node is read for the time of a copy,
    and a reset waits for that copy only.
    """

    def __init__(self, metrics: Metrics, *, limit_pages: int, with_sums: bool) -> None:
        self._metrics, self._limit, self._with_sums = metrics, limit_pages, with_sums
        self._changed = threading.Condition()
        self._copying = threading.Lock()
        self._waiting: deque[OffloadJob] = deque()
        self._jobs: deque[OffloadJob] = deque()
        self._pages = 0
        self._staging: Slot | None = None
        self._draining: list[tuple[Drain, Slot]] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="hicache-offload", daemon=True)
        self._thread.start()

    @property
    def queued_pages(self) -> int:
        return self._pages

    def offer(self, job: OffloadJob) -> bool:
        """Queue a job; False when the queue is full. Never blocks."""
        job.pages = sum(len(part.keys) for part in job.parts)
        with self._changed:
            if self._is_closed or (self._pages + job.pages > self._limit and self._pages):
                self._metrics.add("linker_declined_offloads")
                return False
            self._pages += job.pages
            self._waiting.append(job)
            self._jobs.append(job)
            self._changed.notify_all()
        return True

    def settle(self, result: bool) -> None:
        """Queue a job that is already decided, in its place among the others."""
        with self._changed:
            self._jobs.append(OffloadJob([], (), result))

    def completed(self) -> int:
        """Jobs ended from the oldest on."""
        with self._changed:
            return next((i for i, job in enumerate(self._jobs) if job.result is None), len(self._jobs))

    def pop(self) -> bool:
        with self._changed:
            return bool(self._jobs.popleft().result)

    def cancel_all(self) -> None:
        """Drop what waits, let nothing more be copied, forget all results. Waits for a copy under way at most."""
        with self._changed:
            for job in self._jobs:
                job.is_cancelled = True
            self._waiting.clear()
            self._jobs.clear()
            self._pages = 0
        with self._copying:
            pass

    def close(self, timeout_s: float) -> None:
        """Finish what was accepted as far as ``timeout_s`` allows."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: all(job.result is not None for job in self._jobs), timeout_s)
            self._is_closed = True
            self._changed.notify_all()
        self.cancel_all()
        self._thread.join(max(0.1, deadline - time.monotonic()))

    # ---- the writing thread

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                for event in job.events:
                    event.synchronize()
                result = all(self._store(job, part) for part in job.parts)
            except Exception:
                logger.exception("an offload failed; SGLang offers the node again")
                self._metrics.add("adapter_errors")
                result = False
            self._metrics.add("linker_offloads" if result else "linker_failed_offloads")
            with self._changed:
                job.result = result
                if not job.is_cancelled:
                    self._pages -= job.pages
                self._changed.notify_all()

    def _take(self) -> OffloadJob | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait(1.0)
            return self._waiting.popleft() if self._waiting else None

    def _store(self, job: OffloadJob, part: OffloadPart) -> bool:
        """Write the pages that the store does not have; True when all are there afterwards."""
        missing = np.flatnonzero(~part.pages.store.contains(part.ns, part.keys))
        if not len(missing):
            return True
        rows = part.pool.rows(part.slots, len(part.keys))
        wave = max(1, STAGING_BYTES // part.pool.geometry.page_bytes)
        good = True
        for start in range(0, len(missing), wave):
            good &= self._write(job, part, rows, missing[start : start + wave])
        return good

    def _write(self, job: OffloadJob, part: OffloadPart, rows: NDArray[np.int64], at: NDArray[np.int64]) -> bool:
        geometry = part.pool.geometry
        slot = self._slot(part.pool)
        if slot is None:
            return False
        memory = slot.bytes[: len(at) * geometry.page_bytes].view(len(at), geometry.page_bytes)
        with self._copying:
            if job.is_cancelled:
                return False
            sums = layer_sums(part.pool, rows[at]) if self._with_sums else None
            copy_out(part.pool, rows[at], memory)
        result = part.pages.write(part.ns, [part.keys[i] for i in at.tolist()], memory.numpy(), sums)
        if result.drain is not None:
            self._draining.append((result.drain, slot))
            self._staging = None
        stored = sum(o.is_stored for o in result.outcomes)
        self._metrics.add("linker_offloaded_pages", stored)
        return stored == len(at)

    def _slot(self, pool: DevicePool) -> Slot | None:
        self._draining = [(d, s) for d, s in self._draining if not d.is_done()]
        need = max(STAGING_BYTES, pool.geometry.page_bytes)
        if self._staging is None or len(self._staging.bytes) < need:
            if len(self._draining) >= MAX_DRAINING:
                self._metrics.add("linker_staging_exhausted")
                return None
            self._staging = Slot(need, pool.device)
        return self._staging


def copy_out(pool: DevicePool, rows: NDArray[np.int64], memory: torch.Tensor) -> None:
    """Copy every layer of pages into [pages, page_bytes] as they lie on disk; returns when the bytes are there."""
    geometry = pool.geometry
    for layer, buffers in enumerate(pool.buffers):
        at = geometry.offset(layer)
        for buffer, run in zip(buffers, geometry.runs[layer], strict=True):
            for i, row in enumerate(rows.tolist()):
                source = buffer[row : row + pool.page_tokens].view(-1)
                memory[i, at : at + run].copy_(source, non_blocking=True)
            at += run
    if pool.device.type == "cuda":
        torch.cuda.current_stream(pool.device).synchronize()
