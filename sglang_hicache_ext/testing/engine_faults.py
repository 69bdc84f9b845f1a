"""Engines that misbehave on purpose: seeded faults, operations that never end, a fixed bandwidth.

They wrap a real engine, so that what is not faulted really happens. Same seed and same order of operations, same faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.ports import Drain
from sglang_hicache_ext.storage_backends.engines.base import PENDING, IoEngine, IoPlan, IoResult, OnOps
from sglang_hicache_ext.storage_backends.engines.plans import take

POISON = 0xA5
"""What a short read leaves in the memory it did not fill."""


class Fault(StrEnum):
    """What may happen to one operation."""

    EIO = "eio"
    ENOSPC = "enospc"
    EACCES = "eacces"
    SHORT = "short"  # half of the bytes move, as at the end of a truncated file; only reads
    FLIP = "flip"  # one bit is wrong, in memory after a read, on the device after a write
    DELAY = "delay"  # FaultPlan.delay is called before the operation begins
    HANG = "hang"  # in flight until ``release``: PENDING at once, as if the deadline had passed


_ERRNO = {Fault.EIO: errno.EIO, Fault.ENOSPC: errno.ENOSPC, Fault.EACCES: errno.EACCES}


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which operations are hit. Operations are numbered from 0 over reads and writes in the order they are asked for.

    Attributes:
        seed: of the random choice.
        read, write: fault -> probability per operation.
        exact: operation number -> fault; wins over the probabilities.
        delay: called with the operation's number for DELAY; a test waits for its event in it.
    """

    seed: int = 0
    read: Mapping[Fault, float] = field(default_factory=dict)
    write: Mapping[Fault, float] = field(default_factory=dict)
    exact: Mapping[int, Fault] = field(default_factory=dict)
    delay: Callable[[int], None] | None = None

    def choose(self, number: int, is_write: bool) -> Fault | None:
        """The fault of one operation: depends on the seed, the number and the kind of operation only."""
        if number in self.exact:
            return self.exact[number]
        left = float(np.random.default_rng([self.seed, number]).random())
        for fault, share in (self.write if is_write else self.read).items():
            if left < share:
                return fault
            left -= share
        return None


class _Hung:
    """Operations that the device keeps; the Drain of their batch."""

    def __init__(self, plan: IoPlan, is_write: bool) -> None:
        self.plan, self.is_write = plan, is_write
        self.done = threading.Event()

    def is_done(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self.done.wait(timeout_s)


class _AllOf:
    """The Drain of several drains."""

    def __init__(self, drains: Sequence[Drain]) -> None:
        self._drains = drains

    def is_done(self) -> bool:
        return all(drain.is_done() for drain in self._drains)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(drain.wait(max(0.0, deadline - time.monotonic())) for drain in self._drains)


class _Wrapper:
    """Passes everything on to ``inner``."""

    def __init__(self, inner: IoEngine) -> None:
        self.inner = inner
        self.name = inner.name

    def open_file(self, path: str, *, writable: bool = True) -> int:
        return self.inner.open_file(path, writable=writable)

    def close_file(self, handle: int) -> None:
        self.inner.close_file(handle)

    def register_memory(self, addr: int, nbytes: int) -> bool:
        return self.inner.register_memory(addr, nbytes)

    def unregister_memory(self, addr: int) -> None:
        self.inner.unregister_memory(addr)

    def sync(self, handle: int) -> None:
        self.inner.sync(handle)

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()


class FaultyEngine(_Wrapper):
    """An engine whose operations fail as ``plan`` says. Thread-safe; the plan may be replaced at any time.

    Attributes:
        injected: how often each fault was injected.
    """

    def __init__(self, inner: IoEngine, plan: FaultPlan | None = None) -> None:
        super().__init__(inner)
        self.plan = plan or FaultPlan()
        self.injected: Counter[Fault] = Counter()
        self._lock = threading.Lock()
        self._next = 0
        self._hung: list[_Hung] = []
        self._is_sync_failing = False

    def read(self, plan: IoPlan, deadline_s: float, on_done: OnOps | None = None) -> IoResult:
        faults = self._choose(len(plan), False)
        res, keep, hung = self._set_apart(plan, faults, False)

        def pass_on(positions: NDArray[np.int64]) -> None:
            ops = keep[positions]
            for op in ops.tolist():
                self._spoil_memory(plan, op, faults.get(op))
            whole = np.array([op for op in ops.tolist() if faults.get(op) is not Fault.SHORT], np.int64)
            if on_done is not None and len(whole):
                on_done(whole)

        inner = self.inner.read(take(plan, keep), deadline_s, pass_on)
        res[keep] = inner.res
        for op, fault in faults.items():
            if fault is Fault.SHORT and res[op] > 0:
                res[op] //= 2
        return IoResult(res, _joined(inner.drain, hung))

    def write(self, plan: IoPlan, deadline_s: float, on_submitted: OnOps | None = None) -> IoResult:
        faults = self._choose(len(plan), True)
        res, keep, hung = self._set_apart(plan, faults, True)
        apart = np.setdiff1d(np.arange(len(plan)), keep)
        if on_submitted is not None and len(apart):
            on_submitted(apart)
        pass_on = None if on_submitted is None else lambda positions: on_submitted(keep[positions])
        inner = self.inner.write(take(plan, keep), deadline_s, pass_on)
        res[keep] = inner.res
        for op, fault in faults.items():
            if fault is Fault.FLIP and res[op] > 0:
                self._spoil_device(plan, op, int(res[op]), deadline_s)
        return IoResult(res, _joined(inner.drain, hung))

    def sync(self, handle: int) -> None:
        """Raises OSError(EIO) while ``fail_sync`` is on."""
        if self._is_sync_failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.inner.sync(handle)

    def fail_sync(self, failing: bool = True) -> None:
        self._is_sync_failing = failing

    def release(self, perform: bool = True) -> int:
        """Let the hung operations end: with ``perform`` their bytes move now, late; else they end without moving.

        Returns how many operations ended. Their drains are done when this returns.
        """
        with self._lock:
            hung, self._hung = self._hung, []
        for one in hung:
            if perform:
                (self.inner.write if one.is_write else self.inner.read)(one.plan, 60.0)
            one.done.set()
        return sum(len(one.plan) for one in hung)

    @property
    def hung(self) -> int:
        """Operations that are hanging now."""
        with self._lock:
            return sum(len(one.plan) for one in self._hung)

    def close(self) -> None:
        self.release(perform=False)
        self.inner.close()

    def _choose(self, ops: int, is_write: bool) -> dict[int, Fault]:
        with self._lock:
            plan, first = self.plan, self._next
            self._next += ops
        chosen = {op: plan.choose(first + op, is_write) for op in range(ops)}
        faults = {op: fault for op, fault in chosen.items() if fault is not None}
        if is_write:
            faults = {op: fault for op, fault in faults.items() if fault is not Fault.SHORT}
        with self._lock:
            self.injected.update(faults.values())
        for op, fault in faults.items():
            if fault is Fault.DELAY and plan.delay is not None:
                plan.delay(first + op)
        return faults

    def _set_apart(
        self, plan: IoPlan, faults: Mapping[int, Fault], is_write: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], _Hung | None]:
        """(results of operations that the inner engine does not see, positions that it does, the hung ones)."""
        res = np.zeros(len(plan), np.int64)
        for op, fault in faults.items():
            if fault in _ERRNO:
                res[op] = -_ERRNO[fault]
            elif fault is Fault.HANG:
                res[op] = PENDING
        keep = np.flatnonzero(res == 0).astype(np.int64)
        stuck = np.flatnonzero(res == PENDING).astype(np.int64)
        if not len(stuck):
            return res, keep, None
        hung = _Hung(take(plan, stuck), is_write)
        with self._lock:
            self._hung.append(hung)
        return res, keep, hung

    def _spoil_memory(self, plan: IoPlan, op: int, fault: Fault | None) -> None:
        rows = plan.iov[plan.iov_start[op] : plan.iov_start[op + 1]]
        if fault is Fault.FLIP:
            addr, nbytes = int(rows[0, 0]), int(rows[0, 1])
            cell = ctypes.c_uint8.from_address(addr + ((self.plan.seed + op) * 97 + 1) % nbytes)
            cell.value ^= 1 << (op % 8)
        elif fault is Fault.SHORT:
            left = int(rows[:, 1].sum()) // 2
            for addr, nbytes in rows.tolist():
                kept = min(left, nbytes)
                ctypes.memset(addr + kept, POISON, nbytes - kept)
                left -= kept

    def _spoil_device(self, plan: IoPlan, op: int, nbytes: int, deadline_s: float) -> None:
        """Write the extent once more with one bit flipped, from memory of our own."""
        with contextlib.closing(mmap.mmap(-1, nbytes)) as memory:
            copy = np.frombuffer(memory, np.uint8)
            rows = plan.iov[plan.iov_start[op] : plan.iov_start[op + 1]]
            at = 0
            for addr, size in rows.tolist():
                ctypes.memmove(copy.ctypes.data + at, addr, size)
                at += size
            copy[(self.plan.seed + op) * 97 % nbytes] ^= 1 << (op % 8)
            iov = np.array([[copy.ctypes.data, nbytes]], np.uint64)
            again = IoPlan(plan.files[op : op + 1], plan.offsets[op : op + 1], np.array([0, 1], np.int32), iov, memory)
            self.inner.write(again, deadline_s)
            del copy


def _joined(inner: Drain | None, hung: _Hung | None) -> Drain | None:
    drains = [drain for drain in (inner, hung) if drain is not None]
    return drains[0] if len(drains) == 1 else _AllOf(drains) if drains else None


class ThrottledEngine(_Wrapper):
    """An engine of fixed bandwidth per directory: one simulated drive each, for measuring how striping scales.

    A batch ends when the slowest directory's share of it would have ended. Only for benchmarks and tests: the real
    transfer is done first, and deadlines are not applied to the added time.

    Args:
        bytes_per_s: of each directory.
        clock, sleep: injected time, seconds.
    """

    def __init__(
        self,
        inner: IoEngine,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._directory: dict[int, str] = {}
        self._busy_until: dict[str, float] = {}

    def open_file(self, path: str, *, writable: bool = True) -> int:
        handle = self.inner.open_file(path, writable=writable)
        with self._lock:
            self._directory[handle] = os.path.dirname(os.path.abspath(path))
        return handle

    def close_file(self, handle: int) -> None:
        with self._lock:
            self._directory.pop(handle, None)
        self.inner.close_file(handle)

    def read(self, plan: IoPlan, deadline_s: float, on_done: OnOps | None = None) -> IoResult:
        ends = self._book(plan)
        result = self.inner.read(plan, deadline_s, on_done)
        self._sleep(max(0.0, ends - self._clock()))
        return result

    def write(self, plan: IoPlan, deadline_s: float, on_submitted: OnOps | None = None) -> IoResult:
        ends = self._book(plan)
        result = self.inner.write(plan, deadline_s, on_submitted)
        self._sleep(max(0.0, ends - self._clock()))
        return result

    def _book(self, plan: IoPlan) -> float:
        """Take the batch's time on each directory; when the last one is through."""
        now, ends = self._clock(), 0.0
        nbytes: Counter[str] = Counter()
        with self._lock:
            for handle in np.unique(plan.files).tolist():
                share = int(plan.op_bytes[plan.files == handle].sum())
                nbytes[self._directory.get(handle, "")] += share
            for directory, share in nbytes.items():
                begin = max(now, self._busy_until.get(directory, now))
                self._busy_until[directory] = begin + share / self._bytes_per_s
                ends = max(ends, self._busy_until[directory])
        return ends
