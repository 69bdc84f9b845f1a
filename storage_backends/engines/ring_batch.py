"""One batch on one ring: entries built with array operations, kept ``depth`` deep, results gathered as they complete."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines.base import PENDING, TIMED_OUT, IoPlan, OnOps
from sglang_hicache_ext.storage_backends.engines.files import OpenFile
from sglang_hicache_ext.storage_backends.engines.libc import IOV_MAX
from sglang_hicache_ext.storage_backends.engines.plans import rest_of
from sglang_hicache_ext.storage_backends.engines.ring import Ring
from sglang_hicache_ext.storage_backends.engines.transfer import MAX_STALLS, Progress

READV, WRITEV, READ_FIXED, WRITE_FIXED, ASYNC_CANCEL, READ, WRITE = 1, 2, 4, 5, 14, 22, 23
READV_FIXED, WRITEV_FIXED = 60, 61
"""Operation codes. Source: linux/io_uring.h; the last two are Linux 6.15."""

MAX_CALL_BYTES = 0x7FFFF000
"""Most bytes one call moves. Source: Linux MAX_RW_COUNT."""

_FIXED_FILE = 1 << 0
_CANCEL_BIT = 1 << 31
_GRACE_S = 0.005
_OPEN = -(1 << 61)
_PAUSE_S = 0.001
_WAKE_EVERY = 8

Words = NDArray[np.uint64]
Ops = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RingFiles:
    """Per operation, what the kernel is told about its file.

    Attributes:
        files: the open files, by handle; an operation whose handle is missing fails with EBADF.
        fd: [ops] int64: slot in the ring's file table, or descriptor.
        is_slot: [ops] bool.
    """

    files: dict[int, OpenFile]
    fd: Ops
    is_slot: NDArray[np.bool_]


def entries_of(
    plan: IoPlan, files: RingFiles, buffers: Ops | None, is_write: bool, vector_fixed: bool, user_data: int
) -> Words:
    """Submission entries, [ops, 8] words, one for each operation however many memory pieces it has.

    Args:
        buffers: [pieces] registered buffer of each memory piece, -1 for none; None when nothing is registered.
        vector_fixed: the kernel knows READV_FIXED and WRITEV_FIXED.
        user_data: of the first operation; the others count up from it.
    """
    ops = len(plan)
    entries = np.zeros((ops, 8), np.uint64)
    addr, length = plan.iov[:, 0], plan.iov[:, 1]
    if plan.has_single_pieces:
        plain, fixed = (WRITE, WRITE_FIXED) if is_write else (READ, READ_FIXED)
        length = np.minimum(length, MAX_CALL_BYTES)
    else:
        plain, fixed = (WRITEV, WRITEV_FIXED) if is_write else (READV, READV_FIXED)
        first, counts = plan.iov_start[:-1].astype(np.int64), np.diff(plan.iov_start).astype(np.int64)
        addr = (plan.iov.ctypes.data + 16 * first).astype(np.uint64)
        length = np.minimum(counts, IOV_MAX).astype(np.uint64)
        buffers = _common_buffers(buffers, first, counts) if vector_fixed else None
    code: Ops | int = plain
    if buffers is not None:
        code = np.where(buffers >= 0, fixed, plain)
        entries[:, 5] = np.maximum(buffers, 0)
    code = code | files.is_slot * (_FIXED_FILE << 8) | files.fd << 32
    entries[:, 0] = code.view(np.uint64)
    entries[:, 1] = plan.offsets
    entries[:, 2] = addr
    entries[:, 3] = length
    entries[:, 4] = np.uint64(user_data) + np.arange(ops, dtype=np.uint64)
    return entries


def _common_buffers(buffers: Ops | None, first: Ops, counts: Ops) -> Ops | None:
    """[ops] the one registered buffer all pieces of an operation lie in, -1 where there is no such."""
    if buffers is None or not (counts > 0).all():
        return None
    low, high = np.minimum.reduceat(buffers, first), np.maximum.reduceat(buffers, first)
    return np.where(low == high, low, -1)


class RingBatch:
    """Carries out one batch on the calling thread, the owner of ``ring``.

    Args:
        entries: from ``entries_of``, with ``user_data`` its first number; a number names one batch for the
            ring's whole life, so that a completion of an older batch is never taken for one of this.
        depth: most operations in flight.
    """

    def __init__(
        self, ring: Ring, entries: Words, plan: IoPlan, files: RingFiles, is_write: bool, user_data: int, depth: int
    ) -> None:
        self._ring, self._entries, self._plan, self._files = ring, entries, plan, files
        self._is_write, self._user_data, self._depth = is_write, user_data, depth
        self._base = np.uint64(user_data)
        self._want = plan.op_bytes
        self._size = _common_size(self._want)
        self.res = np.full(len(plan), _OPEN, np.int64)
        self._left = len(plan)
        self._sent = 0
        self._again: list[int] = []
        self._progress: dict[int, Progress] = {}
        self._pieces: dict[int, Words] = {}
        self._nothing = np.empty(0, np.int64)
        self.in_flight = 0

    def refuse(self, ops: Ops, error: int) -> None:
        """Fail operations before the batch runs; they are skipped."""
        self.res[ops] = error
        self._left -= len(ops)
        keep = np.ones(len(self._entries), np.bool_)
        keep[ops] = False
        self._entries = self._entries[keep]

    def run(self, deadline: float, on_done: OnOps | None, on_submitted: OnOps | None) -> None:
        """Run until all operations are done or ``deadline`` (monotonic seconds). Results are in ``res``.

        Afterwards ``in_flight`` operations are PENDING in ``res``: the ring must be retired.
        """
        fresh = self._nothing
        stalls = 0
        while self._left:
            queued = self._top_up()
            if on_submitted is not None and queued:
                self._ring.submit()  # an error shows again at the wait
                on_submitted(self._positions(self._sent - queued, self._sent))
            if on_done is not None and len(fresh):
                if self._ring.unsubmitted:
                    self._ring.submit()
                on_done(fresh)
            left_s = deadline - time.monotonic()
            error = self._ring.wait(self._wake_after(on_done is not None), left_s) if left_s > 0 else -errno.ETIME
            fresh = self._reap()
            if error < 0:
                stalls = 0 if len(fresh) else stalls + 1
                if not self._go_on(error, stalls, deadline):
                    fresh = np.concatenate((fresh, self._stop(error)))
                    break
        if on_done is not None and len(fresh):
            on_done(fresh)

    def _positions(self, first: int, last: int) -> Ops:
        return (self._entries[first:last, 4] - self._base).astype(np.int64)

    def _go_on(self, error: int, stalls: int, deadline: float) -> bool:
        if not self._left:
            return True
        if error in (-errno.EAGAIN, -errno.EBUSY):
            self._ring.pause(_PAUSE_S)
            return stalls <= MAX_STALLS
        return error in (-errno.EINTR, -errno.ETIME) and time.monotonic() < deadline

    def _wake_after(self, has_work: bool) -> int:
        """Completions worth waking up for: enough to share the cost of a wake-up, few enough to keep the drive fed.

        Near the end, with nothing left to queue, only the last one is where nobody works on completions; else fewer
        and fewer, so that little work is left when the drive has done its own.
        """
        most = min(_WAKE_EVERY, self._depth // 4)
        if self._sent == len(self._entries) and not self._again:
            if not has_work:
                return self.in_flight
            most = min(most, self.in_flight // 2)
        return max(1, min(most, self.in_flight))

    def _top_up(self) -> int:
        """Queue operations up to the depth; how many were queued for the first time."""
        room = self._depth - self.in_flight
        while self._again and room > 0:
            self._ring.push(self._entry_again(self._again.pop()))
            self.in_flight += 1
            room -= 1
        count = min(room, len(self._entries) - self._sent)
        if count <= 0:
            return 0
        self._ring.push(self._entries[self._sent : self._sent + count])
        self._sent += count
        self.in_flight += count
        return count

    def _reap(self) -> Ops:
        """Take completions; positions of operations that are done in full."""
        data, moved = self._ring.reap()
        if not len(data):
            return self._nothing
        numbers = data - self._base  # wraps around for older batches
        if int(numbers.max()) >= len(self.res):
            ours = numbers < len(self.res)
            numbers, moved = numbers[ours], moved[ours]
        ops = numbers.view(np.int64)
        self.in_flight -= len(ops)
        if self._size and len(ops) and int(moved.min()) == self._size:  # the common case: nothing is short
            self.res[ops] = self._size
            self._left -= len(ops)
            return ops
        full = moved == self._want[ops]
        if not full.all():
            late = [
                op for op, n in zip(ops[~full].tolist(), moved[~full].tolist(), strict=True) if self._went_on(op, n)
            ]
            ops = np.concatenate((ops[full], np.array(late, np.int64)))
        self.res[ops] = self._want[ops]
        self._left -= len(ops)
        return ops

    def _went_on(self, op: int, moved: int) -> bool:
        """A completion that is no full transfer: finish it, or queue the rest. True when it is done in full now."""
        progress = self._progress.get(op)
        if progress is None:
            file = self._files.files[int(self._plan.files[op])]
            progress = Progress(file, int(self._plan.offsets[op]), int(self._want[op]), self._is_write)
            self._progress[op] = progress
        if not progress.step(moved):
            self._again.append(op)
            return False
        if progress.result == self._want[op]:
            return True
        self.res[op] = progress.result
        self._left -= 1
        return False

    def _entry_again(self, op: int) -> Words:
        """The entry of what is left of ``op``: vectored, unregistered, its pieces kept alive here."""
        done = self._progress[op].done
        starts = self._plan.iov_start
        pieces = rest_of(self._plan.iov[starts[op] : starts[op + 1]], done)
        self._pieces[op] = pieces
        fd, is_slot = int(self._files.fd[op]), bool(self._files.is_slot[op])
        code = (WRITEV if self._is_write else READV) | (_FIXED_FILE << 8 if is_slot else 0) | fd << 32
        offset = int(self._plan.offsets[op]) + done
        row = [code, offset, pieces.ctypes.data, min(len(pieces), IOV_MAX), self._user_data + op, 0, 0, 0]
        return np.array([row], np.uint64)

    def _stop(self, error: int) -> Ops:
        """The deadline passed, or the ring failed: withdraw what is queued, cancel what runs, mark the rest PENDING.

        Returns positions that completed in full meanwhile.
        """
        never_began = TIMED_OUT if error in (-errno.ETIME, -errno.EINTR) else error
        for user_data in self._ring.withdraw():
            self.res[user_data - self._user_data] = never_began
            self.in_flight -= 1
        late = [self._nothing]
        if self.in_flight:
            self._cancel()
            grace = time.monotonic() + _GRACE_S
            while self.in_flight and (left_s := grace - time.monotonic()) > 0:
                if self._ring.wait(1, left_s) not in (0, -errno.EINTR, -errno.ETIME):
                    break
                late.append(self._reap())
        self.res[self.res == -errno.ECANCELED] = TIMED_OUT
        running = self._running()
        self.res[self.res == _OPEN] = never_began
        self.res[running] = PENDING
        return np.concatenate(late)

    def _cancel(self) -> None:
        running = self._running()
        cancels = np.zeros((len(running), 8), np.uint64)
        cancels[:, 0] = np.uint64(ASYNC_CANCEL | 0xFFFFFFFF << 32)
        cancels[:, 2] = (running + self._user_data).astype(np.uint64)
        cancels[:, 4] = np.uint64(self._user_data + _CANCEL_BIT)
        self._ring.push(cancels)

    def _running(self) -> Ops:
        """Positions of operations the kernel has, at this moment."""
        waiting = set(self._again)
        entered = self._positions(0, self._sent).tolist()
        return np.array([op for op in entered if self.res[op] == _OPEN and op not in waiting], np.int64)


def _common_size(sizes: Ops) -> int:
    """Bytes of every operation when all are equal and one call can move them, else 0."""
    size = int(sizes[0]) if len(sizes) else 0
    return size if 0 < size <= MAX_CALL_BYTES and bool((sizes == size).all()) else 0
