"""The rings of an engine: one for each calling thread, taken back when the thread ends, retired when I/O is stuck on it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_hicache_ext.storage_backends.engines import libc
from sglang_hicache_ext.storage_backends.engines.files import OpenFile
from sglang_hicache_ext.storage_backends.engines.ring import FLAG_STEPS, Ring
from sglang_hicache_ext.storage_backends.engines.ring_memory import RegisteredMemory, Table

FILE_SLOTS = (256, 32, 1)
"""Sizes of the file table to try: it counts against RLIMIT_NOFILE. Slot 0 is the watch pipe."""

_REGISTER_FILES, _FILES_UPDATE = 2, 6
_EMPTY = -1


class RingDrain:
    """The Drain of a retired ring.

    The ring's file table holds the write end of a pipe. The kernel frees the table only after the last operation of
    the closed ring has ended; then the read end hangs up. This needs no thread and works from any thread, which the
    ring itself, owned by one thread, does not. ``owner`` stays referenced until then.
    """

    def __init__(self, watch_fd: int, owner: Any) -> None:
        self._fd = watch_fd
        self._owner = owner
        self._done = False

    def is_done(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        if not self._done:
            poll = select.poll()
            poll.register(self._fd, 0)
            self._done = bool(poll.poll(max(0.0, timeout_s) * 1000))
            if self._done:
                self._owner = None
        return self._done

    def __del__(self) -> None:
        os.close(self._fd)


class ThreadRing:
    """A ring with its file table and buffers. ``busy`` is held during a batch; the owner thread alone runs batches."""

    def __init__(self, depth: int, call: libc.Syscall, steps: tuple[int, ...]) -> None:
        self.busy = threading.Lock()
        self.ring = Ring(depth, call, steps)
        self.batches = 0
        self.is_retired = False
        self._files: list[int] = []
        self._table: Table | None = None
        self._is_shared = False
        try:
            self._watch_fd = self._register_files()
        except BaseException:
            self.ring.close()
            raise

    def _register_files(self) -> int:
        """Register a sparse table with the watch pipe's write end in slot 0; returns the read end."""
        watch, held = os.pipe2(os.O_CLOEXEC)
        error = 0
        try:
            for slots in FILE_SLOTS:
                table = np.full(slots, _EMPTY, np.int32)
                table[0] = held
                error = self.ring.register(_REGISTER_FILES, table.ctypes.data, slots)
                if error >= 0:
                    self._files = [_EMPTY] * slots
                    return watch
            raise OSError(-error, f"registering files: {os.strerror(-error)}")
        except BaseException:
            os.close(watch)
            raise
        finally:
            os.close(held)

    def slot_of(self, file: OpenFile) -> int:
        """Slot of ``file`` in the table, registering it when needed; -1: use the descriptor."""
        slot = file.slot
        if not 0 < slot < len(self._files):
            return _EMPTY
        if self._files[slot] != file.handle:
            if self._put(slot, file.fd) < 0:
                return _EMPTY
            self._files[slot] = file.handle
        return slot

    def _put(self, slot: int, fd: int) -> int:
        fds = np.array([fd], np.int32)
        update = np.array([slot, fds.ctypes.data], np.uint64)
        return self.ring.register(_FILES_UPDATE, update.ctypes.data, 1)

    def holds(self, handle: int) -> bool:
        return handle in self._files

    def drop(self, handles: set[int]) -> None:
        """Let closed files go, so that their descriptors and disk space do."""
        for slot, handle in enumerate(self._files):
            if slot and handle in handles and self._put(slot, _EMPTY) >= 0:
                self._files[slot] = _EMPTY

    def buffers(self, memory: RegisteredMemory) -> Table | None:
        """The registered pieces this ring may use, brought up to date; None when there are none."""
        table = memory.table
        if self._table is None or self._table.generation != table.generation:
            self._is_shared = memory.share(self.ring, table, self._is_shared)
            self._table = table
        return self._table if self._is_shared else None

    def retire(self, owner: Any = None) -> RingDrain:
        """Close the ring; the drain is done when the last operation has ended. ``busy`` must be held."""
        self.is_retired = True
        self.ring.close()
        return RingDrain(self._watch_fd, owner)


class _Lease:
    """Lives in a thread's local storage; its end is the thread's end."""

    def __init__(self, pool: RingPool, ring: ThreadRing) -> None:
        self.pool, self.ring = pool, ring

    def __del__(self) -> None:
        self.pool.discard(self.ring)


class RingPool:
    """Rings by thread. Thread-safe."""

    def __init__(self, depth: int, call: libc.Syscall = libc.syscall, steps: tuple[int, ...] = FLAG_STEPS) -> None:
        self._depth, self._call, self._steps = depth, call, steps
        self._lock = threading.RLock()
        self._local = threading.local()
        self._rings: set[ThreadRing] = set()
        self._drains: list[RingDrain] = []
        self._closed_files: set[int] = set()
        self._is_closed = False

    def acquire(self) -> ThreadRing:
        """The calling thread's ring, busy. Raises OSError when one cannot be made."""
        lease: _Lease | None = getattr(self._local, "lease", None)
        if lease is not None:
            lease.ring.busy.acquire()
            if not lease.ring.is_retired:
                return lease.ring
            lease.ring.busy.release()
        ring = ThreadRing(self._depth, self._call, self._steps)
        ring.busy.acquire()
        with self._lock:
            self._rings.add(ring)
        self._local.lease = _Lease(self, ring)
        return ring

    def release(self, ring: ThreadRing, in_flight: int, owner: Any) -> RingDrain | None:
        """End of a batch. With operations in flight the ring is retired and the drain returned."""
        with self._lock:
            drain = None
            if in_flight:
                drain = self._retire(ring, owner)
                self._drains.append(drain)
            elif self._is_closed:
                self._retire(ring)
            elif self._closed_files:
                ring.drop({handle for handle in self._closed_files if ring.holds(handle)})
                self._forget_closed()
            ring.busy.release()
        return drain

    def _retire(self, ring: ThreadRing, owner: Any = None) -> RingDrain:
        self._rings.discard(ring)
        self._drains = [drain for drain in self._drains if not drain.is_done()]
        return ring.retire(owner)

    def _forget_closed(self) -> None:
        self._closed_files = {h for h in self._closed_files if any(ring.holds(h) for ring in self._rings)}

    def discard(self, ring: ThreadRing) -> None:
        """Take back the ring of a thread that ended."""
        with self._lock:
            if not ring.is_retired:
                self._retire(ring)

    def close_file(self, handle: int) -> None:
        """Make every ring let go of a file: an idle one by a fresh ring, a busy one at the end of its batch."""
        with self._lock:
            self._closed_files.add(handle)
            self._renew_idle(lambda ring: ring.holds(handle))
            self._forget_closed()

    def renew_idle(self) -> None:
        """Give idle threads a fresh ring at their next batch, so that none keeps memory pinned."""
        with self._lock:
            self._renew_idle(lambda ring: True)

    def _renew_idle(self, wanted: Callable[[ThreadRing], bool]) -> None:
        for ring in list(self._rings):
            if wanted(ring) and ring.busy.acquire(blocking=False):
                self._retire(ring)
                ring.busy.release()

    @property
    def rings(self) -> int:
        with self._lock:
            return len(self._rings)

    @property
    def draining(self) -> int:
        with self._lock:
            self._drains = [drain for drain in self._drains if not drain.is_done()]
            return len(self._drains)

    def close(self, timeout_s: float) -> None:
        """Retire idle rings now; a busy one is retired by its thread when its batch ends. Bounded."""
        with self._lock:
            self._is_closed = True
            rings = list(self._rings)
        deadline = time.monotonic() + timeout_s
        for ring in rings:
            if ring.busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
                with self._lock:
                    if not ring.is_retired:
                        self._retire(ring)
                ring.busy.release()
