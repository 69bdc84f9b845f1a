"""kvikio's POSIX thread pool over host memory.

Host buffers never take cuFile: GPUDirect Storage is for device buffers. What this engine gives is the pool and
the settings that a kvikio deployment already runs, under the same rules as the others.

kvikio looks up the CUDA driver before any I/O, also for host memory, and can hang when the driver answers with an error.
So its first use is a write and a read in a child process with a time limit.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.storage_backends.engines.base import IoPlan, IoResult, OnOps
from sglang_hicache_ext.storage_backends.engines.batch import Batch
from sglang_hicache_ext.storage_backends.engines.file_engine import FileEngine
from sglang_hicache_ext.storage_backends.engines.files import FileTable, OpenFile, temporary_name
from sglang_hicache_ext.storage_backends.engines.plans import distinct_files, rest_of
from sglang_hicache_ext.storage_backends.engines.workers import DaemonWorkers

_CHILD = """
import sys, kvikio, numpy
page = numpy.arange(4096, dtype=numpy.uint8)
with kvikio.CuFile(sys.argv[1], "w+") as file:
    assert file.pwrite(page, 4096, 0).get() == 4096
    back = numpy.zeros(4096, numpy.uint8)
    assert file.pread(back, 4096, 0).get() == 4096 and (back == page).all()
"""
_proven = threading.Event()
_EXTRA = "pip install 'sglang-hicache-ext[gds-cu12]' (or gds-cu13) on a machine with the NVIDIA driver"


def try_kvikio(directory: str, timeout_s: float) -> None:
    """Prove in a child process that kvikio moves a page in ``directory``. Raises CapabilityError with the reason.

    Once it worked, later calls of this process return at once: what can hang is the driver, not the directory.
    """
    if _proven.is_set():
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CapabilityError(f"engine 'kvikio' needs the CUDA driver: {error}", "engine", _EXTRA) from error
    path = os.path.join(directory, temporary_name("kvikio-probe"))
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, path], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CapabilityError(
            f"engine 'kvikio' hung for {timeout_s} s on its first page", "engine", "check the NVIDIA driver"
        ) from error
    finally:
        if os.path.exists(path):
            os.unlink(path)
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise CapabilityError(f"engine 'kvikio' does not work: {reason}", "engine", _EXTRA)
    _proven.set()


class KvikioEngine(FileEngine):
    """kvikio futures, one per memory piece, awaited by worker threads so that the caller keeps its deadline.

    Args:
        directory: where the first use is tried.
        depth: most operations in flight in one batch.
        threads: of kvikio's pool, which is one per process.
        direct: sets kvikio's opportunistic direct I/O for reads and writes.
        probe_timeout_s: limit of the first use.

    Raises:
        CapabilityError: kvikio or the CUDA driver is missing or does not work; names what to install.
    """

    name = "kvikio"

    def __init__(
        self,
        directory: str,
        *,
        depth: int = 32,
        threads: int = 8,
        direct: bool = True,
        sync_timeout_s: float = 30.0,
        probe_timeout_s: float = 30.0,
    ) -> None:
        try_kvikio(directory, probe_timeout_s)
        import kvikio
        import kvikio.defaults

        self._kvikio: Any = kvikio
        self._defaults: Any = kvikio.defaults
        self._defaults.set({"num_threads": threads, "auto_direct_io_read": direct, "auto_direct_io_write": direct})
        super().__init__(FileTable(direct=False, on_shut=self._shut), sync_timeout_s)
        self._depth, self._direct = depth, direct
        self._cufiles: dict[int, Any] = {}
        self._workers = DaemonWorkers(4, "hicache-kvikio")
        self._last_error = ""

    def open_file(self, path: str, *, writable: bool = True) -> int:
        file = self._files.open(path, writable)
        try:
            self._cufiles[file.handle] = self._kvikio.CuFile(path, "r+" if writable else "r")
        except RuntimeError as error:
            self._files.close(file.handle)
            raise OSError(errno.EIO, str(error), path) from error
        return file.handle

    def _shut(self, file: OpenFile) -> None:
        cufile = self._cufiles.pop(file.handle, None)
        if cufile is not None:
            cufile.close()

    def _run(
        self, plan: IoPlan, deadline_s: float, is_write: bool, on_done: OnOps | None, on_submitted: OnOps | None
    ) -> IoResult:
        deadline = time.monotonic() + deadline_s
        if not len(plan):
            return IoResult(np.empty(0, np.int64))
        batch = Batch(plan.op_bytes, plan)
        everything = np.arange(len(plan), dtype=np.int64)
        held = self._files.acquire(distinct_files(plan))
        if not self._workers.submit(lambda: self._serve(batch, plan, held, is_write)):
            self._files.release(held.values())
            return IoResult(np.full(len(plan), -errno.EBADF, np.int64))
        try:
            if on_submitted is not None:
                on_submitted(everything)
            return batch.wait(deadline, on_done)
        finally:
            batch.abandon()
            if batch.running:
                self._workers.make_up(1)
                batch.after(lambda: self._workers.unstuck(1))

    def _serve(self, batch: Batch, plan: IoPlan, held: dict[int, OpenFile], is_write: bool) -> None:
        """Worker thread: keep ``depth`` operations in flight and collect them in order."""
        sizes = plan.op_bytes
        flying: list[tuple[int, Callable[[], int]]] = []
        try:
            for op in range(len(plan)):
                if len(flying) == self._depth:
                    self._collect(batch, *flying.pop(0))
                if not batch.begin(np.array([op], np.int64)):
                    break
                flying.append((op, self._start(plan, held, is_write, op, int(sizes[op]))))
            for op, result in flying:
                self._collect(batch, op, result)
        finally:
            self._files.release(held.values())

    def _collect(self, batch: Batch, op: int, result: Callable[[], int]) -> None:
        batch.finish(np.array([op], np.int64), np.array([result()], np.int64))

    def _start(
        self, plan: IoPlan, held: dict[int, OpenFile], is_write: bool, op: int, nbytes: int
    ) -> Callable[[], int]:
        """Begin one operation; the answer waits for its bytes moved or -errno."""
        file = held.get(int(plan.files[op]))
        if file is None or (is_write and not file.writable):
            return lambda: -errno.EBADF
        iov, offset = plan.iov[plan.iov_start[op] : plan.iov_start[op + 1]], int(plan.offsets[op])
        if not is_write:
            iov, nbytes = self._within_file(file, iov, offset, nbytes)
        call = self._cufiles[file.handle].pwrite if is_write else self._cufiles[file.handle].pread
        futures: list[tuple[Any, Any]] = []
        error = ""
        for addr, size in iov.tolist():
            try:
                piece = self.piece(addr, size)
                futures.append((piece, call(piece, size, offset)))
            except RuntimeError as raised:
                error = str(raised)
                break
            offset += size
        return lambda: self._result(futures, nbytes, error)

    def piece(self, addr: int, size: int) -> Any:
        """Memory as kvikio takes it; a future does not keep it alive, so it is kept until the future's end."""
        return memoryview((ctypes.c_uint8 * size).from_address(addr)).cast("B")

    def _result(self, futures: list[tuple[Any, Any]], nbytes: int, error: str) -> int:
        """Wait for every piece, also after an error: memory is free only when all have ended."""
        moved = 0
        for _, future in futures:
            try:
                moved += int(future.get())
            except (RuntimeError, OSError) as raised:
                error = error or str(raised)
        if error:
            self._last_error = error  # kvikio's exceptions carry no errno
            return -errno.EIO
        return moved if moved == nbytes else -errno.EIO

    def _within_file(
        self, file: OpenFile, iov: NDArray[np.uint64], offset: int, nbytes: int
    ) -> tuple[NDArray[np.uint64], int]:
        """Cut a read at the end of the file, where kvikio fails instead of reading short."""
        left = max(0, os.fstat(file.fd).st_size - offset)
        if left >= nbytes:
            return iov, nbytes
        rest = rest_of(iov, left)
        cut = iov[: len(iov) - len(rest) + (1 if len(rest) else 0)].copy()
        if len(rest):
            cut[-1, 1] -= rest[0, 1]
        return cut[cut[:, 1] > 0], left

    def describe(self) -> dict[str, Any]:
        compat = str(self._defaults.get("compat_mode"))
        return {
            "engine": self.name,
            **self._files.describe(),
            "direct_requested": self._direct,
            "direct": bool(self._defaults.get("auto_direct_io_read")),
            "direct_reason": "kvikio decides per call: aligned parts go direct",
            "threads": int(self._defaults.get("num_threads")),
            "compat_mode_requested": compat,
            "path": "posix",
            "path_reason": "host memory never takes cuFile",
            "registered_memory": False,
            "registered_memory_reason": "kvikio registers device memory only",
            "last_error": self._last_error,
        }

    def close(self) -> None:
        self._files.close_all()
        self._workers.close(timeout_s=1.0)
