"""The portable floor: buffered calls through aiofiles on an event loop of our own; works on any file system."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.storage_backends.engines import libc
from sglang_hicache_ext.storage_backends.engines.base import IoPlan, IoResult, OnOps
from sglang_hicache_ext.storage_backends.engines.batch import Batch
from sglang_hicache_ext.storage_backends.engines.file_engine import FileEngine
from sglang_hicache_ext.storage_backends.engines.files import FileTable, OpenFile
from sglang_hicache_ext.storage_backends.engines.plans import distinct_files
from sglang_hicache_ext.storage_backends.engines.transfer import transfer
from sglang_hicache_ext.storage_backends.engines.workers import DaemonWorkers

MAX_CONCURRENT = 16
"""Operations in flight over all batches."""


class DaemonExecutor(Executor):
    """concurrent.futures over daemon threads, so that a dead device does not block interpreter exit."""

    def __init__(self, threads: int) -> None:
        self.workers = DaemonWorkers(threads, "hicache-aiofiles")

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        if not self.workers.submit(work):
            raise RuntimeError("the engine is closed")
        return future


class AiofilesEngine(FileEngine):
    """Buffered I/O: any alignment of memory and offsets, no registration.

    Raises:
        CapabilityError: aiofiles is not installed.
    """

    name = "aiofiles"

    def __init__(self, *, depth: int = 32, sync_timeout_s: float = 30.0) -> None:
        try:
            from aiofiles.os import wrap
        except ImportError as error:
            raise CapabilityError(
                "engine 'aiofiles' needs the package aiofiles", "engine", "pip install 'sglang-hicache-ext[aiofiles]'"
            ) from error
        super().__init__(FileTable(direct=False), sync_timeout_s)
        self._transfer: Any = wrap(transfer)
        self._concurrent = min(depth, MAX_CONCURRENT)
        self._executor = DaemonExecutor(self._concurrent)
        self._slots = asyncio.Semaphore(self._concurrent)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="hicache-aiofiles-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _run(
        self, plan: IoPlan, deadline_s: float, is_write: bool, on_done: OnOps | None, on_submitted: OnOps | None
    ) -> IoResult:
        deadline = time.monotonic() + deadline_s
        if not len(plan):
            return IoResult(np.empty(0, np.int64))
        batch = Batch(plan.op_bytes, plan)
        everything = np.arange(len(plan), dtype=np.int64)
        held = self._files.acquire(distinct_files(plan))
        try:
            self._loop.call_soon_threadsafe(self._begin, batch, plan, held, is_write)
        except RuntimeError:  # the loop is closed
            self._files.release(held.values())
            return IoResult(np.full(len(plan), -errno.EBADF, np.int64))
        try:
            if on_submitted is not None:
                on_submitted(everything)
            return batch.wait(deadline, on_done)
        finally:
            batch.abandon()

    def _begin(self, batch: Batch, plan: IoPlan, held: dict[int, OpenFile], is_write: bool) -> None:
        task = self._loop.create_task(self._batch(batch, plan, held, is_write))
        task.add_done_callback(lambda _: self._files.release(held.values()))

    async def _batch(self, batch: Batch, plan: IoPlan, held: dict[int, OpenFile], is_write: bool) -> None:
        sizes = plan.op_bytes
        await asyncio.gather(
            *(self._operation(batch, plan, held, is_write, op, int(sizes[op])) for op in range(len(plan)))
        )

    async def _operation(
        self, batch: Batch, plan: IoPlan, held: dict[int, OpenFile], is_write: bool, op: int, nbytes: int
    ) -> None:
        ops = np.array([op], np.int64)
        file = held.get(int(plan.files[op]))
        if file is None:
            batch.refuse(ops, -errno.EBADF)
            return
        async with self._slots:
            if not batch.begin(ops):
                return
            batch.finish(ops, np.array([await self._move(plan, file, is_write, op, nbytes)], np.int64))

    async def _move(self, plan: IoPlan, file: OpenFile, is_write: bool, op: int, nbytes: int) -> int:
        iov: NDArray[np.uint64] = plan.iov[plan.iov_start[op] : plan.iov_start[op + 1]]
        call = libc.pwritev if is_write else libc.preadv
        try:
            moved = await self._transfer(
                call, file, iov, int(plan.offsets[op]), nbytes, is_write, executor=self._executor
            )
        except RuntimeError:  # closed meanwhile: the call never began
            return -errno.EBADF
        return int(moved)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            **self._files.describe(),
            "concurrent": self._concurrent,
            "registered_memory": False,
            "registered_memory_reason": "buffered I/O does not use it",
        }

    def close(self) -> None:
        self._files.close_all()
        self._executor.workers.close(timeout_s=1.0)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(1.0)
