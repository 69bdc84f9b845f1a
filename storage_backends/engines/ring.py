"""One io_uring over NumPy views of the kernel's rings; no compiled code.

The ring belongs to one thread. Submission entries are written as rows of eight 64-bit words, ``io_uring_enter`` is
called through ctypes (which releases the interpreter lock), completions are read as arrays.

Memory order: without SQPOLL the kernel reads the submission ring only inside our own ``enter``. With DEFER_TASKRUN it
writes completions there too, so plain loads and stores do. On older kernels completions may be posted from another CPU;
then ``_fence`` orders the tail's load before the entries' and the entries' loads before the head's store.

Source: linux/io_uring.h; io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines import libc

_SETUP, _ENTER, _REGISTER = 425, 426, 427

COOP_TASKRUN, SUBMIT_ALL, SINGLE_ISSUER, DEFER_TASKRUN, NO_SQARRAY = 1 << 8, 1 << 7, 1 << 12, 1 << 13, 1 << 16
FLAG_STEPS = (
    SUBMIT_ALL | SINGLE_ISSUER | DEFER_TASKRUN | NO_SQARRAY,  # Linux 6.6
    SUBMIT_ALL | SINGLE_ISSUER | DEFER_TASKRUN,  # 6.1
    SUBMIT_ALL | COOP_TASKRUN,  # 5.19
    0,
)
FLAG_NAMES = {
    SUBMIT_ALL: "SUBMIT_ALL",
    COOP_TASKRUN: "COOP_TASKRUN",
    SINGLE_ISSUER: "SINGLE_ISSUER",
    DEFER_TASKRUN: "DEFER_TASKRUN",
    NO_SQARRAY: "NO_SQARRAY",
}
_SINGLE_MMAP, _NODROP, _SUBMIT_STABLE, _EXT_ARG = 1 << 0, 1 << 1, 1 << 2, 1 << 8
_NEEDED = _SINGLE_MMAP | _NODROP | _SUBMIT_STABLE | _EXT_ARG  # all of them since Linux 5.11

_SQES_OFFSET = 0x10000000
_GETEVENTS, _ENTER_EXT_ARG = 1 << 0, 1 << 3
_EXT_ARG_BYTES = 24
_PROBE_OPS, _OP_SUPPORTED = 256, 1
_REGISTER_PROBE = 8
_U32 = 0xFFFFFFFF


class Ring:
    """A set-up ring. Calls must come from the thread that made it, except ``close``.

    Args:
        depth: submission entries, rounded up to a power of two by the kernel.
        call: the system call; tests put a refusing one here.
        steps: set-up flags to try, in order, while the kernel says EINVAL.

    Raises:
        OSError: the kernel refuses (EPERM, ENOSYS: seccomp or io_uring_disabled; ENOMEM: RLIMIT_MEMLOCK on old
            kernels; EMFILE), or is older than Linux 5.11 (EOPNOTSUPP).
    """

    def __init__(self, depth: int, call: libc.Syscall = libc.syscall, steps: tuple[int, ...] = FLAG_STEPS) -> None:
        self._call = call
        self._maps: list[tuple[int, int]] = []
        self.fd = -1
        params = self._setup(depth, steps)
        try:
            self._map(params)
        except BaseException:
            self.close()
            raise
        self._timeout = np.zeros(2, np.int64)
        self._arg = np.array([0, 0, self._timeout.ctypes.data], np.uint64)
        self._arg_addr = self._arg.ctypes.data
        self._lock = threading.Lock()
        self._lock.acquire()

    def _setup(self, depth: int, steps: tuple[int, ...]) -> NDArray[np.uint32]:
        result = -errno.EINVAL
        for flags in steps:
            params = np.zeros(30, np.uint32)
            params[2] = flags
            result = self._call(_SETUP, depth, params.ctypes.data, 0, 0, 0, 0)
            if result != -errno.EINVAL:
                break
        if result < 0:
            raise OSError(-result, f"io_uring_setup: {os.strerror(-result)}")
        self.fd, self.flags, self.features = result, int(params[2]), int(params[5])
        if self.features & _NEEDED != _NEEDED:
            self.close()
            raise OSError(errno.EOPNOTSUPP, "io_uring of this kernel is too old, Linux 5.11 is needed")
        return params

    def _map(self, params: NDArray[np.uint32]) -> None:
        """View the rings. Words 10-19 of ``params`` are the offsets of the submission ring, 20-29 of completions."""
        sq, cq = params[10:20].astype(int), params[20:30].astype(int)
        self.entries, self._cq_entries = int(params[0]), int(params[1])
        has_array = not self.flags & NO_SQARRAY
        nbytes = max(sq[6] + 4 * self.entries * has_array, cq[5] + 16 * self._cq_entries)
        rings = self._view(int(nbytes), 0)
        words = rings.view(np.uint32)
        self._sq_tail, self._sq_mask = words[sq[1] // 4 :][:1], int(words[sq[2] // 4])
        self._cq_head, self._cq_tail = words[cq[0] // 4 :][:1], words[cq[1] // 4 :][:1]
        self._cq_mask = int(words[cq[2] // 4])
        completions = rings[cq[5] : cq[5] + 16 * self._cq_entries]
        self._cqes = completions.view(np.uint64).reshape(-1, 2)
        self._sqes = self._view(64 * self.entries, _SQES_OFFSET).view(np.uint64).reshape(-1, 8)
        if has_array:
            words[sq[6] // 4 :][: self.entries] = np.arange(self.entries)
        self._tail, self._head = int(self._sq_tail[0]), int(self._cq_head[0])
        self._unsubmitted = 0
        self._is_deferred = bool(self.flags & DEFER_TASKRUN)

    def _view(self, nbytes: int, offset: int) -> NDArray[np.uint8]:
        nbytes = -(-nbytes // 4096) * 4096
        addr = libc.map_shared(self.fd, nbytes, offset)
        self._maps.append((addr, nbytes))
        return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(addr)).cast("B"), np.uint8)

    def push(self, entries: NDArray[np.uint64]) -> None:
        """Queue rows of [n, 8] words; the caller keeps within ``entries`` of the ring."""
        count, at = len(entries), self._tail & self._sq_mask
        first = min(count, self.entries - at)
        self._sqes[at : at + first] = entries[:first]
        if first < count:
            self._sqes[: count - first] = entries[first:]
        self._tail = (self._tail + count) & _U32
        self._sq_tail[0] = self._tail
        self._unsubmitted += count

    def withdraw(self) -> list[int]:
        """Take back what was pushed and the kernel has not consumed; the user data of those entries."""
        count, self._unsubmitted = self._unsubmitted, 0
        self._tail = (self._tail - count) & _U32
        where = (self._tail + np.arange(count)) & self._sq_mask
        self._sq_tail[0] = self._tail
        return [int(data) for data in self._sqes[where, 4]]

    def submit(self) -> int:
        """Hand over what was pushed, without waiting. 0 or -errno (EINTR, EAGAIN and EBUSY may be tried again)."""
        return self._enter(self._unsubmitted, 0, 0, 0, 0)

    def wait(self, completions: int, timeout_s: float) -> int:
        """Hand over what was pushed and wait. 0 or -errno; -ETIME after ``timeout_s``."""
        return self._wait(self._unsubmitted, completions, timeout_s)

    def pause(self, timeout_s: float) -> int:
        """Hand over nothing; wait for one completion. 0 or -errno."""
        return self._wait(0, 1, timeout_s)

    def _wait(self, submissions: int, completions: int, timeout_s: float) -> int:
        timeout = max(0.0, timeout_s)
        self._timeout[0] = int(timeout)
        self._timeout[1] = int((timeout - int(timeout)) * 1e9)
        return self._enter(submissions, completions, _GETEVENTS | _ENTER_EXT_ARG, self._arg_addr, _EXT_ARG_BYTES)

    def _enter(self, submissions: int, completions: int, flags: int, arg: int, arg_bytes: int) -> int:
        result = self._call(_ENTER, self.fd, submissions, completions, flags, arg, arg_bytes)
        if result < 0:
            return result
        self._unsubmitted -= min(result, submissions)
        return 0

    @property
    def unsubmitted(self) -> int:
        return self._unsubmitted

    def reap(self) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Completions that are there: (user data, results), copies."""
        tail = int(self._cq_tail[0])
        count, at = (tail - self._head) & _U32, self._head & self._cq_mask
        if not self._is_deferred:
            self._fence()
        if at + count <= self._cq_entries:
            taken = self._cqes[at : at + count].copy()
        else:
            taken = self._cqes[(at + np.arange(count)) & self._cq_mask]
        if not self._is_deferred:
            self._fence()
        self._head = tail
        self._cq_head[0] = tail
        return taken[:, 0], taken.view(np.int32)[:, 2]

    def _fence(self) -> None:
        """A release and an acquire on one lock word: loads before it happen before loads after it."""
        self._lock.release()
        self._lock.acquire()

    def register(self, opcode: int, addr: int, count: int) -> int:
        """io_uring_register. Result or -errno."""
        return self._call(_REGISTER, self.fd, opcode, addr, count, 0, 0)

    def supported_ops(self) -> frozenset[int]:
        """Operation codes this kernel knows; empty when it cannot be asked."""
        probe = np.zeros(16 + 8 * _PROBE_OPS, np.uint8)
        if self.register(_REGISTER_PROBE, probe.ctypes.data, _PROBE_OPS) < 0:
            return frozenset()
        ops = probe[16:].reshape(-1, 8)
        return frozenset(ops[ops[:, 2] & _OP_SUPPORTED != 0, 0].tolist())

    def close(self) -> None:
        """Unmap and close; any thread, while no call runs. Idempotent. Operations in flight end in the background."""
        empty: Any = np.empty(0, np.uint32)
        self._sq_tail = self._cq_head = self._cq_tail = self._cqes = self._sqes = empty
        while self._maps:
            libc.unmap(*self._maps.pop())
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def flag_names(flags: int) -> str:
    return "|".join(name for bit, name in FLAG_NAMES.items() if flags & bit) or "plain"
