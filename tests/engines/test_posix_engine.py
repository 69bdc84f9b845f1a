"""What is special about the thread-pool engine: merging, retries, and threads that a device keeps."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from sglang_hicache_ext.storage_backends.engines import PENDING, TIMED_OUT, libc
from sglang_hicache_ext.storage_backends.engines.plans import in_file_order, merged_runs, rest_of
from sglang_hicache_ext.storage_backends.engines.posix import PosixEngine
from sglang_hicache_ext.storage_backends.engines.transfer import MAX_STALLS
from sglang_hicache_ext.storage_backends.engines.workers import MAX_GROWTH, DaemonWorkers

PAGE = 16384


class Stuck:
    """preadv that does not return for one file offset until it is let go."""

    def __init__(self, offset: int) -> None:
        self.offset, self.entered, self.let_go = offset, threading.Event(), threading.Event()

    def __call__(self, fd, iov, offset):
        if offset == self.offset:
            self.entered.set()
            self.let_go.wait(60)
        return libc.preadv(fd, iov, offset)


def test_neighbours_on_disk_become_one_call(kit, memory, numbered_file):
    calls = []

    def counting(fd, iov, offset):
        calls.append((offset, len(iov)))
        return libc.preadv(fd, iov, offset)

    engine = PosixEngine(preadv=counting)
    path, content = numbered_file(128, PAGE)
    target = memory(128 * PAGE)
    order = np.random.default_rng(1).permutation(128).tolist()
    result = engine.read(kit.paged(engine.open_file(path), order, PAGE, target), 30.0)
    assert (result.res == PAGE).all() and np.array_equal(target.reshape(128, PAGE), content[order])
    assert sorted(calls) == [(i * 16 * PAGE, 16) for i in range(8)]
    engine.close()


def test_runs_respect_both_caps_and_gaps(kit):
    plan = kit.plan_of([1, 1, 1, 1, 2], [0, 10, 20, 40, 50], [[(1, 10)]] * 5)
    sizes = plan.op_bytes
    assert merged_runs(plan, sizes, 0, 5, 1024, 1 << 20) == [(0, 3), (3, 4), (4, 5)]
    assert merged_runs(plan, sizes, 0, 3, 2, 1 << 20) == [(0, 2), (2, 3)]
    assert merged_runs(plan, sizes, 0, 3, 1024, 15) == [(0, 1), (1, 2), (2, 3)]


def test_sorting_keeps_each_operation_with_its_pieces(kit):
    plan = kit.plan_of([2, 1, 1], [0, 8, 0], [[(100, 1), (200, 2)], [(300, 3)], [(400, 4), (500, 5), (600, 6)]])
    order, by_file = in_file_order(plan)
    assert order.tolist() == [2, 1, 0]
    assert by_file.iov[:, 0].tolist() == [400, 500, 600, 300, 100, 200]
    assert by_file.iov_start.tolist() == [0, 3, 4, 6] and by_file.offsets.tolist() == [0, 8, 0]


@pytest.mark.parametrize(
    ("done", "rest"),
    [(0, [(100, 10), (200, 5)]), (4, [(104, 6), (200, 5)]), (10, [(200, 5)]), (14, [(204, 1)]), (15, [])],
)
def test_the_rest_of_a_short_transfer_starts_where_it_stopped(done, rest):
    iov = np.array([(100, 10), (200, 5)], np.uint64)
    assert [tuple(row) for row in rest_of(iov, done).tolist()] == rest
    assert iov.tolist() == [[100, 10], [200, 5]]


def test_short_and_interrupted_calls_go_on_where_they_stopped(kit, memory, numbered_file):
    turns = {}

    def grudging(fd, iov, offset):
        turn = turns[offset] = turns.get(offset, -1) + 1
        if turn < 2:
            return (-errno.EINTR, -errno.EAGAIN)[turn]
        first = iov[:1].copy()
        first[0, 1] = min(int(first[0, 1]), 4096 + 512)  # an unaligned bit
        return libc.preadv(fd, first, offset) if int(first[0, 1]) % 512 == 0 else -errno.EINVAL

    engine = PosixEngine(preadv=grudging)
    path, content = numbered_file(8, PAGE)
    target = memory(8 * PAGE)
    result = engine.read(kit.paged(engine.open_file(path), range(8), PAGE, target), 30.0)
    assert (result.res == PAGE).all() and np.array_equal(target.reshape(8, PAGE), content)
    engine.close()


def test_a_call_that_never_stops_being_interrupted_fails(kit, memory, numbered_file):
    calls = []

    def interrupted(fd, iov, offset):
        calls.append(offset)
        return -errno.EINTR

    engine = PosixEngine(preadv=interrupted)
    path, _ = numbered_file(1, PAGE)
    result = engine.read(kit.paged(engine.open_file(path), [0], PAGE, memory(PAGE)), 30.0)
    assert result.res.tolist() == [-errno.EINTR] and len(calls) == MAX_STALLS + 1
    engine.close()


def test_a_write_that_moves_nothing_is_an_error(kit, memory, numbered_file):
    engine = PosixEngine(pwritev=lambda fd, iov, offset: 0)
    path, _ = numbered_file(1, PAGE)
    assert engine.write(kit.paged(engine.open_file(path), [0], PAGE, memory(PAGE)), 30.0).res.tolist() == [-errno.EIO]
    engine.close()


def test_a_stuck_call_is_pending_the_rest_of_its_task_times_out_and_others_are_served(kit, memory, numbered_file):
    stuck = Stuck(2 * PAGE)
    engine = PosixEngine(preadv=stuck, threads=1)
    path, content = numbered_file(6, PAGE)
    handle, target = engine.open_file(path), memory(6 * PAGE)
    plan = kit.paged(handle, [0, 2, 4], PAGE, target)
    result = engine.read(plan, 0.3)
    assert stuck.entered.is_set()
    assert result.res.tolist() == [PAGE, PENDING, TIMED_OUT]
    assert result.drain is not None and not result.drain.is_done() and not result.drain.wait(0.0)
    assert not target[PAGE:].any()

    deadline = time.monotonic() + 30
    while engine._workers._queued and time.monotonic() < deadline:  # the thread made up ends the rest of the task ...
        pass
    assert engine._workers.threads == 2  # ... and stays: it is not the one that was stuck
    other = memory(PAGE)
    assert engine.read(kit.paged(handle, [5], PAGE, other), 30.0).res.tolist() == [PAGE]
    assert np.array_equal(other, content[5])

    engine.close_file(handle)  # the descriptor outlives the handle while a call runs on it
    stuck.let_go.set()
    assert result.drain.wait(30.0) and result.drain.is_done()
    assert np.array_equal(target[PAGE : 2 * PAGE], content[2]) and not target[2 * PAGE :].any()
    engine.close()


def test_close_is_bounded_while_a_call_is_stuck(kit, memory, numbered_file):
    stuck = Stuck(0)
    engine = PosixEngine(preadv=stuck)
    path, _ = numbered_file(1, PAGE)
    result = engine.read(kit.paged(engine.open_file(path), [0], PAGE, memory(PAGE)), 0.05)
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 10
    stuck.let_go.set()
    assert result.drain is not None and result.drain.wait(30.0)


@pytest.mark.slow
def test_a_stuck_call_does_not_keep_the_process_alive(tmp_path):
    code = """
        import mmap, sys, threading
        import numpy as np
        from sglang_hicache_ext.storage_backends.engines import IoPlan
        from sglang_hicache_ext.storage_backends.engines.posix import PosixEngine
        path = sys.argv[1] + "/data"
        open(path, "wb").write(bytes(4096))
        engine = PosixEngine(preadv=lambda *_: threading.Event().wait())
        memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
        iov = np.array([[memory.ctypes.data, 4096]], np.uint64)
        handle = np.array([engine.open_file(path)], np.int32)
        plan = IoPlan(handle, np.zeros(1, np.int64), np.array([0, 1], np.int32), iov, memory)
        print(engine.read(plan, 0.05).drain.is_done())
        """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert child.returncode == 0 and child.stdout.strip() == "False", child.stderr


def test_a_sync_that_hangs_ends_with_a_timeout(numbered_file, monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr("os.fdatasync", lambda fd: let_go.wait(30))
    engine = PosixEngine(sync_timeout_s=0.05)
    handle = engine.open_file(numbered_file(1, PAGE)[0])
    with pytest.raises(OSError) as raised:
        engine.sync(handle)
    assert raised.value.errno == errno.ETIMEDOUT
    let_go.set()
    engine.close()


def test_workers_grow_only_to_their_limit_and_shrink_again():
    workers, let_go = DaemonWorkers(2, "test"), threading.Event()
    ran = threading.Semaphore(0)

    def hold() -> None:
        ran.release()
        let_go.wait(30)

    for _ in range(20):
        workers.submit(hold)
    workers.make_up(20)
    assert workers.threads == 2 * MAX_GROWTH
    for _ in range(2 * MAX_GROWTH):
        assert ran.acquire(timeout=30)
    assert not ran.acquire(blocking=False)
    let_go.set()
    for _ in range(20 - 2 * MAX_GROWTH):
        assert ran.acquire(timeout=30)
    workers.unstuck(20)
    assert workers.close(30.0) and workers.threads == 0
    assert not workers.submit(hold)
