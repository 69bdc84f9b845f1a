"""What is special about io_uring: kernels that refuse, old kernels, short transfers, stuck operations, ring ownership."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter

import numpy as np
import pytest

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.storage_backends.engines import PENDING, TIMED_OUT, libc, open_engine
from sglang_hicache_ext.storage_backends.engines.io_uring import IoUringEngine
from sglang_hicache_ext.storage_backends.engines.probe import make_engine
from sglang_hicache_ext.storage_backends.engines.ring import FLAG_STEPS, Ring
from sglang_hicache_ext.storage_backends.engines.ring_batch import RingBatch

PAGE = 16384
SETUP, ENTER, REGISTER = 425, 426, 427
BUFFERS2, CLONE_BUFFERS, FILES = 15, 30, 2


def available() -> bool:
    try:
        Ring(1).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not available(), reason="io_uring is not available here")


class Kernel:
    """The real kernel, but calls that ``refuse`` names answer with an error. Counts what was called."""

    def __init__(self) -> None:
        self.errors: dict[tuple[int, int], int] = {}
        self.calls: Counter[tuple[int, int]] = Counter()
        self.setup_flags_refused = 0
        self.enter_errors: list[int] = []
        self.enter_always = 0

    def refuse(self, number: int, opcode: int, error: int) -> None:
        self.errors[number, opcode] = error

    def __call__(self, number: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
        key = (number, b if number == REGISTER else 0)
        self.calls[key] += 1
        if key in self.errors:
            return -self.errors[key]
        if number == SETUP and self._flags(b) & self.setup_flags_refused:
            return -errno.EINVAL
        if number == ENTER and (self.enter_always or self.enter_errors):
            return -(self.enter_always or self.enter_errors.pop())
        return libc.syscall(number, a, b, c, d, e, f)

    @staticmethod
    def _flags(addr: int) -> int:
        import ctypes

        return ctypes.c_uint32.from_address(addr + 8).value


def soon(condition, timeout_s: float = 10.0) -> bool:
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        pause.wait(0.01)
    return bool(condition())


def check_pages(engine, kit, memory, numbered_file, pages=40, pieces=2) -> None:
    path, content = numbered_file(pages, PAGE)
    handle, target = engine.open_file(path), memory(pages * PAGE)
    result = engine.read(kit.paged(handle, range(pages), PAGE, target, pieces), 30.0)
    assert (result.res == PAGE).all() and result.drain is None
    assert np.array_equal(kit.gather(target, pages, PAGE, pieces), content)
    engine.close_file(handle)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_auto_takes_another_engine_where_io_uring_is_blocked_and_asking_for_it_says_why(tmp_path, error):
    kernel = Kernel()
    kernel.refuse(SETUP, 0, error)

    def opener(name, directory, depth, direct):
        return IoUringEngine(call=kernel) if name == "io_uring" else make_engine(name, directory, depth, direct)

    engine = open_engine("auto", str(tmp_path), opener=opener)
    assert engine.name == "posix"
    engine.close()
    with pytest.raises(CapabilityError) as raised:
        open_engine("io_uring", str(tmp_path), opener=opener)
    assert os.strerror(error) in str(raised.value)
    assert ("seccomp" in str(raised.value)) == (error != errno.ENOMEM)


@pytest.mark.parametrize("step", range(len(FLAG_STEPS)))
def test_an_older_kernel_gets_the_flags_it_knows(kit, memory, numbered_file, step):
    kernel = Kernel()
    kernel.setup_flags_refused = FLAG_STEPS[step - 1] & ~FLAG_STEPS[step] if step else 0
    engine = IoUringEngine(call=kernel)
    target = memory(1 << 20)
    assert engine.register_memory(target.ctypes.data, len(target))
    check_pages(engine, kit, memory, numbered_file)
    shown = engine.describe()["setup_flags"]
    assert ("NO_SQARRAY" in shown, "DEFER_TASKRUN" in shown) == (step == 0, step < 2)
    assert (shown == "plain") == (step == 3)
    engine.close()


def test_a_kernel_that_cannot_clone_buffers_pins_them_for_each_ring(kit, memory, numbered_file):
    kernel = Kernel()
    kernel.refuse(REGISTER, CLONE_BUFFERS, errno.EINVAL)
    engine = IoUringEngine(call=kernel)
    path, content = numbered_file(16, PAGE)
    target = memory(16 * PAGE)
    assert engine.register_memory(target.ctypes.data, len(target))
    result = engine.read(kit.paged(engine.open_file(path), range(16), PAGE, target), 30.0)
    assert (result.res == PAGE).all() and np.array_equal(target.reshape(16, PAGE), content)
    assert kernel.calls[REGISTER, CLONE_BUFFERS] == 1 and kernel.calls[REGISTER, 0] == 1
    assert engine.describe()["registered_memory_reason"] == ""
    engine.close()


def test_registration_that_the_limits_refuse_is_reported_and_i_o_goes_on(kit, memory, numbered_file):
    kernel = Kernel()
    kernel.refuse(REGISTER, 16, errno.ENOMEM)
    engine = IoUringEngine(call=kernel)
    target = memory(1 << 20)
    assert not engine.register_memory(target.ctypes.data, len(target))
    assert "RLIMIT_MEMLOCK" in engine.describe()["registered_memory_reason"]
    check_pages(engine, kit, memory, numbered_file)
    engine.close()


def test_registered_memory_is_used_by_rings_that_were_there_before(kit, memory, numbered_file, monkeypatch):
    codes: Counter[int] = Counter()
    push = Ring.push

    def spy(ring, entries):
        codes.update((entries[:, 0] & np.uint64(0xFF)).tolist())
        push(ring, entries)

    monkeypatch.setattr(Ring, "push", spy)
    engine = IoUringEngine()
    path, content = numbered_file(16, PAGE)
    handle, target = engine.open_file(path), memory(16 * PAGE)
    plan = kit.paged(handle, range(16), PAGE, target)
    engine.read(plan, 30.0)
    assert set(codes) == {22}
    codes.clear()
    registrar = threading.Thread(target=lambda: engine.register_memory(target.ctypes.data, len(target)))
    registrar.start()
    registrar.join(10)
    engine.read(plan, 30.0)
    assert set(codes) == {4}
    codes.clear()
    engine.read(kit.paged(handle, range(16), PAGE, target, 2), 30.0)
    assert sum(codes.values()) == 16  # one entry a page, however many pieces
    assert np.array_equal(kit.gather(target, 16, PAGE, 2), content)
    engine.close()


def test_a_page_that_straddles_the_registered_range_goes_unregistered(kit, memory, numbered_file):
    path, content = numbered_file(4, PAGE)
    engine = IoUringEngine()
    target = memory(4 * PAGE)
    assert engine.register_memory(target.ctypes.data + PAGE, 2 * PAGE + 4096)
    result = engine.read(kit.paged(engine.open_file(path), range(4), PAGE, target), 30.0)
    assert (result.res == PAGE).all() and np.array_equal(target.reshape(4, PAGE), content)
    engine.close()


def test_without_room_in_the_file_table_plain_descriptors_serve(kit, memory, numbered_file, monkeypatch):
    monkeypatch.setattr("sglang_hicache_ext.storage_backends.engines.ring_pool.FILE_SLOTS", (1,))
    engine = IoUringEngine()
    check_pages(engine, kit, memory, numbered_file)
    engine.close()


def test_interrupted_and_refused_enters_are_tried_again(kit, memory, numbered_file):
    kernel = Kernel()
    engine = IoUringEngine(call=kernel)
    kernel.enter_errors = [errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EINTR] * 3
    check_pages(engine, kit, memory, numbered_file)
    assert not kernel.enter_errors
    engine.close()


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EBADR])
def test_a_ring_that_only_fails_ends_with_that_error_in_bounded_time(kit, memory, numbered_file, error):
    kernel = Kernel()
    engine = IoUringEngine(call=kernel)
    path, content = numbered_file(8, PAGE)
    handle, target = engine.open_file(path), memory(8 * PAGE)
    plan = kit.paged(handle, range(8), PAGE, target)
    kernel.enter_always = error
    begin = time.monotonic()
    result = engine.read(plan, 60.0)
    assert time.monotonic() - begin < 20
    assert set(result.res.tolist()) == {-error} and result.drain is None
    kernel.enter_always = 0
    assert (engine.read(plan, 30.0).res == PAGE).all() and np.array_equal(target.reshape(8, PAGE), content)
    engine.close()


@pytest.mark.parametrize("is_write", [False, True])
def test_short_and_interrupted_transfers_go_on_where_they_stopped(kit, memory, numbered_file, monkeypatch, is_write):
    reap, seen = Ring.reap, Counter()

    def shortened(ring):
        """First completion of an operation: half an aligned transfer; second: EAGAIN; third: an unaligned bit."""
        data, res = reap(ring)
        for i, number in enumerate(data.tolist()):
            turn = seen[number]
            seen[number] += 1
            if res[i] > 0 and turn < 3:
                res[i] = (res[i] // 2 // 4096 * 4096, -errno.EAGAIN, min(res[i], 4096 + 100))[turn]
        return data, res

    monkeypatch.setattr(Ring, "reap", shortened)
    engine = IoUringEngine(depth=8)
    pages, page = 20, 65536
    path, content = numbered_file(pages, page)
    handle, target = engine.open_file(path), memory(pages * page)
    plan = kit.paged(handle, range(pages), page, target, 2)
    if is_write:
        target[:] = np.random.default_rng(0).integers(0, 256, len(target), dtype=np.uint8)
        result = engine.write(plan, 30.0)
        with open(path, "rb") as file:
            assert file.read() == kit.gather(target, pages, page, 2).tobytes()
    else:
        result = engine.read(plan, 30.0)
        assert np.array_equal(kit.gather(target, pages, page, 2), content)
    assert (result.res == page).all() and min(seen.values()) >= 4
    engine.close()


@pytest.fixture
def pipe_file(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    return path


def mixed_plan(kit, engine, memory, path, pipe_file):
    """Three pages of a file and, in the middle, a read that nobody answers."""
    target = memory(4 * PAGE)
    file, pipe = engine.open_file(path), engine.open_file(pipe_file)
    rows = [[(target.ctypes.data + i * PAGE, PAGE)] for i in range(4)]
    return target, kit.plan_of([file, pipe, file, file], [0, 0, PAGE, 2 * PAGE], rows, target)


def test_an_operation_without_an_answer_is_cancelled_at_the_deadline(kit, memory, numbered_file, pipe_file):
    path, content = numbered_file(3, PAGE)
    engine = IoUringEngine()
    target, plan = mixed_plan(kit, engine, memory, path, pipe_file)
    begin = time.monotonic()
    result = engine.read(plan, 0.2)
    assert 0.15 < time.monotonic() - begin < 5
    assert result.res.tolist() == [PAGE, TIMED_OUT, PAGE, PAGE] and result.drain is None
    assert np.array_equal(target.reshape(4, PAGE)[[0, 2, 3]], content)
    assert engine.describe()["rings"] == 1
    engine.close()


def test_an_operation_that_cannot_be_cancelled_is_pending_and_its_ring_retired(
    kit, memory, numbered_file, pipe_file, monkeypatch
):
    monkeypatch.setattr(RingBatch, "_cancel", lambda batch: None)
    path, content = numbered_file(3, PAGE)
    engine = IoUringEngine()
    _, plan = mixed_plan(kit, engine, memory, path, pipe_file)
    result = engine.read(plan, 0.1)
    assert result.res.tolist() == [PAGE, PENDING, PAGE, PAGE]
    assert result.drain is not None and engine.describe()["rings"] == 0
    fresh = memory(3 * PAGE)  # the thread goes on with a new ring
    again = engine.read(kit.paged(int(plan.files[0]), range(3), PAGE, fresh), 30.0)
    assert (again.res == PAGE).all() and np.array_equal(fresh.reshape(3, PAGE), content)
    assert result.drain.wait(30.0)  # closing the ring ends a pipe read
    assert engine.describe()["draining_rings"] == 0
    engine.close()


def test_a_late_completion_is_not_taken_for_one_of_the_next_batch(kit, memory, numbered_file, pipe_file, monkeypatch):
    monkeypatch.setattr(RingBatch, "_cancel", lambda batch: None)
    monkeypatch.setattr(  # keep the ring, which the engine would retire
        "sglang_hicache_ext.storage_backends.engines.ring_pool.RingPool.release",
        lambda pool, ring, in_flight, owner: ring.busy.release(),
    )
    path, content = numbered_file(64, PAGE)
    engine = IoUringEngine()
    target, plan = mixed_plan(kit, engine, memory, path, pipe_file)
    assert engine.read(plan, 0.1).res[1] == PENDING
    with open(pipe_file, "wb") as writer:
        writer.write(b"x" * 100)  # completes the old read, on the same ring
    fresh, told = memory(64 * PAGE), []
    file = int(plan.files[0])
    result = engine.read(kit.paged(file, range(64), PAGE, fresh), 30.0, lambda p: told.extend(p.tolist()))
    assert bytes(target[PAGE : PAGE + 100]) == b"x" * 100
    assert (result.res == PAGE).all() and sorted(told) == list(range(64))
    assert np.array_equal(fresh.reshape(64, PAGE), content)
    engine.close()


def test_the_ring_of_a_thread_that_ended_is_taken_back(kit, memory, numbered_file):
    path, _ = numbered_file(4, PAGE)
    engine = IoUringEngine()
    handle, before = engine.open_file(path), len(os.listdir("/proc/self/fd"))

    def work() -> None:
        engine.read(kit.paged(handle, range(4), PAGE, memory(4 * PAGE)), 30.0)

    for _ in range(12):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    assert engine.describe()["rings"] == 0
    assert soon(lambda: len(os.listdir("/proc/self/fd")) <= before)
    engine.close()


def test_a_closed_file_is_let_go_by_the_rings_of_idle_threads(kit, memory, numbered_file):
    path, _ = numbered_file(4, PAGE)
    engine = IoUringEngine()
    handle = engine.open_file(path)
    ready, leave = threading.Event(), threading.Event()

    def work() -> None:
        engine.read(kit.paged(handle, range(4), PAGE, memory(4 * PAGE)), 30.0)
        ready.set()
        leave.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(30)
    engine.close_file(handle)

    def is_free() -> bool:
        """A write lease is given only where nobody else has the file open."""
        with open(path, "rb+") as file:
            try:
                fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError:
                return False
            return True

    assert soon(is_free)
    leave.set()
    thread.join(30)
    engine.close()


def run_child(tmp_path, text: str) -> str:
    code = textwrap.dedent(text)
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 256 << 10])
def test_a_process_with_little_locked_memory_falls_back_to_plain_i_o(tmp_path, limit):
    tmp_path.chmod(0o777)
    out = run_child(
        tmp_path,
        f"""
        import mmap, os, resource, sys
        import numpy as np
        from sglang_hicache_ext.storage_backends.engines import IoPlan
        from sglang_hicache_ext.storage_backends.engines.io_uring import IoUringEngine
        path = sys.argv[1] + "/data"
        open(path, "wb").write(b"a" * 16384)
        engine = IoUringEngine()
        handle = engine.open_file(path)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))
        if os.getuid() == 0:
            os.setuid(65534)  # drops CAP_IPC_LOCK
        memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
        print(engine.register_memory(memory.ctypes.data, 1 << 20))
        iov = np.array([[memory.ctypes.data, 16384]], np.uint64)
        plan = IoPlan(np.array([handle], np.int32), np.zeros(1, np.int64), np.array([0, 1], np.int32), iov, memory)
        print(engine.read(plan, 30.0).res.tolist(), bytes(memory[:3]))
        print(engine.describe()["registered_memory_reason"])
        """,
    )
    assert out.splitlines()[:2] == ["False", "[16384] b'aaa'"]
    assert f"RLIMIT_MEMLOCK is {limit} bytes" in out


@pytest.mark.slow
def test_sixty_four_open_files_are_enough_for_eight_threads(tmp_path):
    out = run_child(
        tmp_path,
        """
        import mmap, resource, sys, threading
        import numpy as np
        from sglang_hicache_ext.storage_backends.engines import IoPlan, open_engine
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        engine = open_engine("auto", sys.argv[1])
        handles = []
        for i in range(20):
            open(f"{sys.argv[1]}/f{i}", "wb").write(bytes([i]) * 4096)
            handles.append(engine.open_file(f"{sys.argv[1]}/f{i}"))
        together, right = threading.Barrier(8), []
        def work():
            memory = np.frombuffer(mmap.mmap(-1, 20 * 4096), np.uint8)
            iov = np.stack([memory.ctypes.data + np.arange(20) * 4096, np.full(20, 4096)], 1).astype(np.uint64)
            starts = np.arange(21, dtype=np.int32)
            plan = IoPlan(np.array(handles, np.int32), np.zeros(20, np.int64), starts, iov, memory)
            for _ in range(5):
                result = engine.read(plan, 30.0)
                together.wait(30)
                right.append(bool((result.res == 4096).all() and (memory.reshape(20, 4096)[:, 7] == range(20)).all()))
        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join(40) for thread in threads]
        print(engine.name, len(right), all(right))
        """,
    )
    assert out.split() == ["io_uring", "40", "True"]
