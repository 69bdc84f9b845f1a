"""The worker process: its end is proof, and it never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.remote.process import ProcessWorker, StartError, WorkerSpec
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore

HERE = str(Path(__file__).parent)
Make = Callable[..., RemoteStore]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HICACHE_EXT_TEST_FOLDER", str(tmp_path))
    return tmp_path


def spec(**changes: Any) -> WorkerSpec:
    return WorkerSpec("fake_engine:FakeEngine", {}, 1 << 20, 2, (HERE,), **changes)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(check: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_after_the_kill_not_one_byte_of_the_ring_moves_any_more(folder: Path) -> None:
    (folder / "scribble").touch()
    worker = ProcessWorker(spec())
    ring, size = worker.ring.base, worker.ring.nbytes
    first = ctypes.string_at(ring, size)
    wait_for(lambda: ctypes.string_at(ring, size) != first, "the worker writes all the time")
    assert worker.kill(10.0)
    after = ctypes.string_at(ring, size)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert ctypes.string_at(ring, size) == after


def test_a_worker_that_cannot_start_gives_its_own_reason_and_leaves_no_process(folder: Path) -> None:
    (folder / "refuse").touch()
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with pytest.raises(StartError, match="refused by the test"):
        ProcessWorker(spec())
    assert children.read_text() == before


def test_the_worker_ends_with_its_parent_even_while_a_call_hangs(folder: Path) -> None:
    (folder / "hang").touch()
    script = f"""
import sys, threading, time
sys.path.insert(0, {HERE!r})
from sglang_hicache_ext.storage_backends.remote.process import ProcessWorker, WorkerSpec
worker = ProcessWorker(WorkerSpec("fake_engine:FakeEngine", {{}}, 1 << 20, 2, ({HERE!r},)))
lane = worker.pool.lease(time.monotonic() + 5).channels[0]
lane.receive(lane.send("put", ["a"], [0], [4096]), time.monotonic() + 5)
lane.send("get", ["a"], [0], [4096])
print(worker.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        wait_for((folder / "hung").exists, "the worker's get hangs")
        assert is_running(worker)
    finally:
        parent.kill()
        parent.wait(10)
        if parent.stdout is not None:
            parent.stdout.close()
    wait_for(lambda: not is_running(worker), "the worker ended too")


@pytest.mark.slow
def test_a_hung_worker_is_killed_and_its_successor_serves(fake_store: Make, folder: Path, pages: Any) -> None:
    store, p = fake_store(in_process=False, remote_lanes=2, remote_deadline_s=0.3), pages(4)
    ns = store.namespace(p.fingerprint)
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    first = store._link.client._worker
    assert isinstance(first, ProcessWorker)
    (folder / "hang").touch()
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LATE}
    (folder / "hang").unlink()
    wait_for(lambda: store._link.client._worker not in (None, first), "a new worker")
    assert not is_running(first.pid) and p.is_target_untouched
    store._link.negative.clear()
    store._link.peers.forgive({"node-0"})
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    assert (p.target == p.data).all()
    print(f"time to a new worker: {store._link.client.rebuild_s:.2f} s")


def test_a_worker_killed_from_outside_is_replaced(fake_store: Make, folder: Path, pages: Any) -> None:
    store, p = fake_store(in_process=False), pages(4)
    ns = store.namespace(p.fingerprint)
    store.write(ns, p.keys, p.source_regions)
    first = store._link.client._worker
    assert isinstance(first, ProcessWorker)
    os.kill(first.pid, signal.SIGKILL)
    outcomes = store.read(ns, p.keys, p.target_regions).outcomes
    assert set(outcomes) == {Outcome.READ_ERROR} and p.is_target_untouched
    wait_for(lambda: store._link.client._worker not in (None, first), "a new worker")
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}


@pytest.mark.slow
def test_degrade_starts_as_a_store_of_misses_and_comes_up_later(fake_store: Make, folder: Path, pages: Any) -> None:
    (folder / "refuse").touch()
    with pytest.raises(ConfigError, match=r"refused by the test .*on_unavailable: degrade"):
        fake_store(in_process=False)
    store, p = fake_store(in_process=False, on_unavailable="degrade"), pages(2)
    ns = store.namespace(p.fingerprint)
    assert not store.is_healthy and store.stats().counters["remote_up"] == 0
    assert store.hit_pages(ns, p.keys) == 0
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.WRITE_ERROR}
    (folder / "refuse").unlink()
    wait_for(lambda: store.hit_pages(ns, p.keys) == 0 and store.is_healthy, "the worker came up")
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}


def test_close_leaves_no_process_and_no_descriptor(fake_store: Make, folder: Path) -> None:
    fake_store(in_process=False).close()
    before = len(os.listdir("/proc/self/fd"))
    store = fake_store(in_process=False)
    worker = store._link.client._worker
    assert isinstance(worker, ProcessWorker)
    pid = worker.pid
    del worker
    store.close()
    assert not is_running(pid)
    assert len(os.listdir("/proc/self/fd")) == before
