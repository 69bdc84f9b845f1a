"""preadv and pwritev in a few chunk tasks per batch: works everywhere, merges neighbours on disk into one call."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines import libc
from sglang_hicache_ext.storage_backends.engines.base import IoPlan, IoResult, OnOps
from sglang_hicache_ext.storage_backends.engines.batch import Batch
from sglang_hicache_ext.storage_backends.engines.file_engine import FileEngine
from sglang_hicache_ext.storage_backends.engines.files import FileTable, OpenFile
from sglang_hicache_ext.storage_backends.engines.plans import distinct_files, in_file_order, merged_runs
from sglang_hicache_ext.storage_backends.engines.transfer import VectoredCall, transfer
from sglang_hicache_ext.storage_backends.engines.workers import DaemonWorkers

TASKS_PER_BATCH = 8
"""Chunk tasks a batch is cut into: enough to fill a drive, few enough that Python's cost per task stays small."""

MERGE_BYTES = 8 << 20
"""Most bytes of one merged call, so that a deadline is looked at often."""


class PosixEngine(FileEngine):
    """Thread-pool engine. Memory needs no registration; with O_DIRECT it must be aligned like the file system says.

    Args:
        direct: ask for O_DIRECT; falls back to buffered per file, see ``describe``.
        threads: worker threads, shared by all calling threads.
        sync_timeout_s: bound of ``sync``.
        preadv, pwritev: the system calls; tests put faulty ones here.
        files: open files shared with another engine, which then closes them.
    """

    name = "posix"

    def __init__(
        self,
        *,
        direct: bool = True,
        threads: int = TASKS_PER_BATCH,
        sync_timeout_s: float = 30.0,
        preadv: VectoredCall = libc.preadv,
        pwritev: VectoredCall = libc.pwritev,
        files: FileTable | None = None,
    ) -> None:
        super().__init__(files or FileTable(direct), sync_timeout_s)
        self._workers = DaemonWorkers(threads, "hicache-posix")
        self._threads = threads
        self._preadv, self._pwritev = preadv, pwritev

    def _run(
        self, plan: IoPlan, deadline_s: float, is_write: bool, on_done: OnOps | None, on_submitted: OnOps | None
    ) -> IoResult:
        deadline = time.monotonic() + deadline_s
        if len(plan) == 0:
            return IoResult(np.empty(0, np.int64))
        order, by_file = in_file_order(plan)
        batch = Batch(plan.op_bytes, plan.owner)
        job = _Job(self, batch, by_file, order, is_write)
        try:
            job.start()
            if on_submitted is not None:
                on_submitted(np.arange(len(plan), dtype=np.int64))
            return batch.wait(deadline, on_done)
        finally:
            batch.abandon()
            job.caller_left()

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            **self._files.describe(),
            "threads": self._threads,
            "registered_memory": False,
            "registered_memory_reason": "preadv and pwritev do not use it",
        }

    def close(self) -> None:
        self._files.close_all()
        self._workers.close(timeout_s=1.0)


class _Job:
    """One batch on its way through the workers: cut, run, and let its files go when the last task ended."""

    def __init__(
        self, engine: PosixEngine, batch: Batch, plan: IoPlan, order: NDArray[np.int64], is_write: bool
    ) -> None:
        self._engine, self._batch, self._plan, self._order, self._is_write = engine, batch, plan, order, is_write
        self._bytes = plan.op_bytes
        self._call = engine._pwritev if is_write else engine._preadv
        self._held = engine._files.acquire(distinct_files(plan))
        self._lock = threading.Lock()
        self._tasks_left = 0
        self._in_task: set[int] = set()
        self._stuck: set[int] = set()

    def start(self) -> None:
        cuts = np.linspace(0, len(self._plan), min(TASKS_PER_BATCH, len(self._plan)) + 1).astype(int).tolist()
        spans = list(itertools.pairwise(cuts))
        self._tasks_left = len(spans) + 1
        for first, last in spans:
            if not self._engine._workers.submit(lambda a=first, b=last: self._task(a, b)):  # type: ignore[misc]
                self._batch.refuse(self._order[first:last], -errno.EBADF)
                self._leave()

    def caller_left(self) -> None:
        """The caller returned; threads still inside a system call are made up for."""
        with self._lock:
            self._stuck = set(self._in_task) if self._batch.running else set()
            if self._stuck:
                self._engine._workers.make_up(len(self._stuck))
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._tasks_left -= 1
            last = self._tasks_left == 0
        if last:
            self._engine._files.release(self._held.values())

    def _task(self, first: int, last: int) -> None:
        with self._lock:
            self._in_task.add(first)
        try:
            for begin, end in merged_runs(self._plan, self._bytes, first, last, libc.IOV_MAX, MERGE_BYTES):
                if not self._run(begin, end):
                    break
        finally:
            with self._lock:
                self._in_task.discard(first)
                if first in self._stuck:  # not a task that began after the caller had left
                    self._stuck.discard(first)
                    self._engine._workers.unstuck(1)
            self._leave()

    def _run(self, begin: int, end: int) -> bool:
        """Move one run of neighbours; False when the deadline has passed."""
        ops = self._order[begin:end]
        if not self._batch.begin(ops):
            return False
        res = self._move(begin, end)
        if res < 0 and end - begin > 1:
            each = [self._move(i, i + 1) for i in range(begin, end)]
            self._batch.finish(ops, np.array(each, np.int64))
            return True
        if res < 0:
            self._batch.finish(ops, np.array([res], np.int64))
            return True
        ends = np.cumsum(self._bytes[begin:end])
        moved = np.clip(res - (ends - self._bytes[begin:end]), 0, self._bytes[begin:end])
        self._batch.finish(ops, moved)
        return True

    def _move(self, begin: int, end: int) -> int:
        file: OpenFile | None = self._held.get(int(self._plan.files[begin]))
        if file is None:
            return -errno.EBADF
        starts = self._plan.iov_start
        iov = self._plan.iov[starts[begin] : starts[end]]
        nbytes = int(self._bytes[begin:end].sum())
        return transfer(self._call, file, iov, int(self._plan.offsets[begin]), nbytes, self._is_write)
