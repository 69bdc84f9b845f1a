"""The io_uring engine: a batch is one submission on the calling thread's own ring, hashing overlaps it by callbacks."""

from __future__ import annotations

import errno
import platform
import threading
import time
from typing import Any

import numpy as np

from sglang_hicache_ext.storage_backends.engines import libc
from sglang_hicache_ext.storage_backends.engines.base import IoPlan, IoResult, OnOps
from sglang_hicache_ext.storage_backends.engines.file_engine import FileEngine
from sglang_hicache_ext.storage_backends.engines.files import FileTable, OpenFile
from sglang_hicache_ext.storage_backends.engines.plans import distinct_files
from sglang_hicache_ext.storage_backends.engines.posix import PosixEngine
from sglang_hicache_ext.storage_backends.engines.ring import FLAG_STEPS, Ring, flag_names
from sglang_hicache_ext.storage_backends.engines.ring_batch import (
    READV_FIXED,
    WRITEV_FIXED,
    RingBatch,
    RingFiles,
    entries_of,
)
from sglang_hicache_ext.storage_backends.engines.ring_memory import RegisteredMemory
from sglang_hicache_ext.storage_backends.engines.ring_pool import FILE_SLOTS, RingPool, ThreadRing


class IoUringEngine(FileEngine):
    """One ring per calling thread, registered files and host memory where the kernel and the limits allow it.

    ``on_done`` and ``on_submitted`` must not raise; when one does, what is in flight is left to the engine, which
    keeps the plan's owner referenced until it ended. A thread that gets no ring later on (descriptors, locked memory)
    is served by the posix engine, and ``describe`` says so.

    Args:
        depth: operations in flight per calling thread.
        direct: ask for O_DIRECT; falls back to buffered per file, see ``describe``.
        sync_timeout_s: bound of ``sync``.
        call: the system call; tests put a refusing one here.
        steps: ring set-up flags to try in order.

    Raises:
        OSError: no ring can be made: EPERM or ENOSYS (seccomp, kernel.io_uring_disabled), ENOMEM, EMFILE,
            EOPNOTSUPP (kernel before 5.11).
    """

    name = "io_uring"

    def __init__(
        self,
        *,
        depth: int = 32,
        direct: bool = True,
        sync_timeout_s: float = 30.0,
        call: libc.Syscall = libc.syscall,
        steps: tuple[int, ...] = FLAG_STEPS,
    ) -> None:
        super().__init__(FileTable(direct), sync_timeout_s)
        self._depth = depth
        self._memory = RegisteredMemory(call)
        self._rings = RingPool(depth, call, steps)
        self._lock = threading.Lock()
        self._free_slots = list(range(max(FILE_SLOTS) - 1, 0, -1))
        self._without_ring = PosixEngine(files=self._files)
        self._ring_reason = ""
        self._features = self._look(depth, call, steps)

    def _look(self, depth: int, call: libc.Syscall, steps: tuple[int, ...]) -> dict[str, Any]:
        ring = Ring(depth, call, steps)
        try:
            ops = ring.supported_ops()
            self._vector_fixed = {READV_FIXED, WRITEV_FIXED} <= ops
            return {"setup_flags": flag_names(ring.flags), "vectored_registered": self._vector_fixed}
        finally:
            ring.close()

    def open_file(self, path: str, *, writable: bool = True) -> int:
        file = self._files.open(path, writable)
        with self._lock:
            file.slot = self._free_slots.pop() if self._free_slots else -1
        return file.handle

    def close_file(self, handle: int) -> None:
        slot = self._files.slot(handle)
        self._files.close(handle)
        self._rings.close_file(handle)
        if slot > 0:
            with self._lock:
                self._free_slots.append(slot)

    def register_memory(self, addr: int, nbytes: int) -> bool:
        return self._memory.register(addr, nbytes)

    def unregister_memory(self, addr: int) -> None:
        self._memory.unregister(addr)
        self._rings.renew_idle()

    def _run(
        self, plan: IoPlan, deadline_s: float, is_write: bool, on_done: OnOps | None, on_submitted: OnOps | None
    ) -> IoResult:
        deadline = time.monotonic() + deadline_s
        try:
            ring = self._rings.acquire()
        except OSError as error:
            self._ring_reason = f"a thread got no ring: {error.strerror}"
            if is_write:
                return self._without_ring.write(plan, deadline_s, on_submitted)
            return self._without_ring.read(plan, deadline_s, on_done)
        held = self._files.acquire(distinct_files(plan))
        in_flight = 0
        try:
            batch = self._batch(ring, plan, held, is_write)
            try:
                batch.run(deadline, on_done, on_submitted)
            finally:
                in_flight = batch.in_flight
        finally:
            drain = self._rings.release(ring, in_flight, (plan, batch) if in_flight else None)
            self._files.release(held.values())
        return IoResult(batch.res, drain)

    def _batch(self, ring: ThreadRing, plan: IoPlan, held: dict[int, OpenFile], is_write: bool) -> RingBatch:
        ring.batches += 1
        user_data = ring.batches << 32
        files = _ring_files(ring, plan, held)
        table = ring.buffers(self._memory)
        buffers = None if table is None or not len(plan.iov) else table.lookup(plan.iov)
        entries = entries_of(plan, files, buffers, is_write, self._vector_fixed, user_data)
        batch = RingBatch(ring.ring, entries, plan, files, is_write, user_data, self._depth)
        closed = np.flatnonzero(files.fd < 0)
        if len(closed):
            batch.refuse(closed, -errno.EBADF)
        return batch

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            **self._files.describe(),
            **self._memory.describe(),
            **self._features,
            "depth": self._depth,
            "rings": self._rings.rings,
            "ring_reason": self._ring_reason,
            "draining_rings": self._rings.draining,
            "kernel": platform.release(),
        }

    def close(self) -> None:
        self._files.close_all()
        self._rings.close(timeout_s=1.0)
        self._without_ring.close()
        self._memory.close()


def _ring_files(ring: ThreadRing, plan: IoPlan, held: dict[int, OpenFile]) -> RingFiles:
    fd = np.full(len(plan), -1, np.int64)
    is_slot = np.zeros(len(plan), np.bool_)
    for handle, file in held.items():
        slot = ring.slot_of(file)
        ops = slice(None) if len(held) == 1 and bool((plan.files == handle).all()) else plan.files == handle
        fd[ops] = slot if slot >= 0 else file.fd
        is_slot[ops] = slot >= 0
    return RingFiles(held, fd, is_slot)
