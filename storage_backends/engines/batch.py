"""The state of one batch that worker threads carry out while its caller waits, up to a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines.base import PENDING, TIMED_OUT, IoResult, OnOps

_QUEUED = -(1 << 61)


class Draining:
    """The Drain of operations that outlived their batch. Keeps ``owner`` referenced until they end."""

    def __init__(self, owner: Any = None) -> None:
        self._done = threading.Event()
        self._owner = owner

    def finish(self) -> None:
        self._owner = None
        self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)


class Batch:
    """Results of ``ops`` operations, written by workers, read once by the caller. Thread-safe.

    A worker asks ``begin`` before it touches memory; after the deadline it gets False and the operations count as
    TIMED_OUT. So an operation is PENDING only when a system call was really running on it at the deadline.
    """

    def __init__(self, op_bytes: NDArray[np.int64], owner: Any) -> None:
        self._want = op_bytes
        self._owner = owner
        self._changed = threading.Condition()
        self._res = np.full(len(op_bytes), _QUEUED, np.int64)
        self._fresh: list[NDArray[np.int64]] = []
        self._left = len(op_bytes)
        self._running = 0
        self._expired = False
        self._drain: Draining | None = None
        self._after: list[Callable[[], None]] = []

    def begin(self, ops: NDArray[np.int64]) -> bool:
        """Claim ``ops`` for a system call; False when the deadline has passed."""
        with self._changed:
            if self._expired:
                return False
            self._res[ops] = PENDING
            self._running += len(ops)
            return True

    def finish(self, ops: NDArray[np.int64], res: NDArray[np.int64]) -> None:
        """Report the results of operations that were begun."""
        with self._changed:
            self._res[ops] = res
            self._running -= len(ops)
            self._left -= len(ops)
            self._fresh.append(ops)
            after = self._end() if self._expired and self._running == 0 else []
            self._changed.notify()
        for call in after:
            call()

    def _end(self) -> list[Callable[[], None]]:
        """The last running operation of an expired batch ended."""
        if self._drain is not None:
            self._drain.finish()
        after, self._after = self._after, []
        return after

    def after(self, call: Callable[[], None]) -> None:
        """Call once, on a worker, when the last operation that outlived the deadline ends; now if none did."""
        with self._changed:
            is_over = self._running == 0
            if not is_over:
                self._after.append(call)
        if is_over:
            call()

    def refuse(self, ops: NDArray[np.int64], res: int) -> None:
        """Report operations that never began."""
        with self._changed:
            if not self._expired:
                self._res[ops] = res
                self._left -= len(ops)
                self._changed.notify()

    def wait(self, deadline: float, on_done: OnOps | None) -> IoResult:
        """Wait for all operations or for ``deadline`` (monotonic seconds), passing on completions meanwhile."""
        while True:
            with self._changed:
                while self._left and not self._fresh:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        return self._expire()
                    self._changed.wait(left_s)
                fresh, self._fresh = self._fresh, []
                finished = self._left == 0
            if on_done is not None and fresh:
                ops = np.concatenate(fresh)
                full = ops[self._res[ops] == self._want[ops]]
                if len(full):
                    on_done(full)
            if finished:
                return IoResult(self._res)

    def abandon(self) -> None:
        """The caller is leaving by an exception: let nothing more begin."""
        with self._changed:
            if not self._expired:
                self._expire()

    def _expire(self) -> IoResult:
        self._expired = True
        res = self._res.copy()
        res[res == _QUEUED] = TIMED_OUT
        if self._running:
            self._drain = Draining(self._owner)
        return IoResult(res, self._drain)

    @property
    def running(self) -> int:
        with self._changed:
            return self._running
