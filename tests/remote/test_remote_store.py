"""RemoteStore over an engine with the real one's faults."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine

from sglang_hicache_ext.arbiter import Arbiter
from sglang_hicache_ext.errors import ConfigError, StoreClosedError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.remote import wire
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore

Make = Callable[..., RemoteStore]
MakePages = Callable[..., Any]


class Hand:
    """A clock turned by hand, for breakers and caches."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def written(store: RemoteStore, pages: Any) -> tuple[Any, FakeEngine, list[str]]:
    """Write ``pages``; returns the namespace, the engine and the pages' names."""
    ns = store.namespace(pages.fingerprint)
    assert set(store.write(ns, pages.keys, pages.source_regions).outcomes) == {WriteOutcome.STORED}
    engine = FakeEngine.latest
    assert engine is not None
    return ns, engine, store._names.names(ns.id, pages.keys)


def wait_for(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10.0
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 300])
def test_pages_come_back_bit_for_bit(fake_store: Make, pages: MakePages, count: int) -> None:
    store, p = fake_store(), pages(count)
    ns = store.namespace(p.fingerprint)
    assert store.write(ns, p.keys, p.source_regions).outcomes == (WriteOutcome.STORED,) * count
    assert store.hit_pages(ns, p.keys) == count
    assert store.read(ns, p.keys, p.target_regions).outcomes == (Outcome.LOADED,) * count
    assert (p.target == p.data).all()
    assert store.metrics.snapshot().pages_queried == count


@pytest.mark.parametrize("cut", [(4096,), (2048, 2048), (1000, 96, 3000), (64,) * 64])
def test_a_page_written_from_one_set_of_regions_reads_into_another(
    fake_store: Make, pages: MakePages, cut: tuple[int, ...]
) -> None:
    store, p = fake_store(), pages(9)
    ns = store.namespace(p.fingerprint)
    store.write(ns, p.keys, regions_of_array(p.data, cut))
    scattered = regions_of_array(p.target, cut[::-1])
    assert set(store.read(ns, p.keys, scattered).outcomes) == {Outcome.LOADED}
    assert (p.target == p.data).all()


def test_a_page_larger_than_half_a_lane_is_refused_and_counted_not_cut(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(staging=1 << 20, remote_lanes=2), pages(2, 300 << 10)
    ns = store.namespace(p.fingerprint)
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.WRITE_ERROR}
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.READ_ERROR}
    assert store.metrics.snapshot().counters["remote_oversized_pages"] == 4


def test_hits_stop_at_the_first_page_that_is_missing(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(1200)
    ns, engine, names = written(store, p)
    assert store.hit_pages(ns, p.keys) == 1200
    del engine.objects[names[700]]
    assert store.hit_pages(ns, p.keys) == 700
    assert store.contains(ns, p.keys).sum() == 1199


@pytest.mark.parametrize("byte", [0, 20, 40, 63, 64, 2000, -1])
def test_a_flipped_byte_is_corrupt_counted_and_removed(fake_store: Make, pages: MakePages, byte: int) -> None:
    store, p = fake_store(), pages(3)
    ns, engine, names = written(store, p)
    damaged = bytearray(engine.objects[names[1]])
    damaged[byte] ^= 0x10
    engine.objects[names[1]] = bytes(damaged)
    outcomes = store.read(ns, p.keys, p.target_regions).outcomes
    if byte in (63,):  # reserved bytes of the header carry nothing
        assert outcomes == (Outcome.LOADED,) * 3
        return
    assert outcomes == (Outcome.LOADED, Outcome.CORRUPT, Outcome.LOADED)
    assert engine.removed == [names[1]]
    assert store.metrics.snapshot().counters["remote_corrupt_pages"] == 1


def test_a_removed_corrupt_page_can_be_written_and_read_again(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(3)
    ns, engine, names = written(store, p)
    engine.objects[names[1]] = bytes(len(engine.objects[names[1]]))
    store.read(ns, p.keys, p.target_regions)
    outcomes = store.write(ns, p.keys, p.source_regions).outcomes
    assert outcomes == (WriteOutcome.PRESENT, WriteOutcome.STORED, WriteOutcome.PRESENT)
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}


def test_another_pages_whole_object_under_a_name_is_not_delivered(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(2)
    ns, engine, names = written(store, p)
    engine.objects[names[0]] = engine.objects[names[1]]
    assert store.read(ns, p.keys, p.target_regions).outcomes == (Outcome.CORRUPT, Outcome.LOADED)


def test_an_object_of_another_length_is_a_mismatch_and_stays(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(2)
    ns, engine, names = written(store, p)
    short = engine.objects[names[0]][:-8]
    engine.objects[names[0]], engine.objects[names[1]] = short, engine.objects[names[1]] + b"more"
    assert store.read(ns, p.keys, p.target_regions).outcomes == (Outcome.MISMATCH, Outcome.MISMATCH)
    assert not engine.removed


def test_a_hung_read_ends_at_its_deadline_and_late_bytes_reach_no_host_page(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(remote_lanes=4), pages(8)
    ns, engine, names = written(store, p)
    engine.hanging.update(names)
    started = time.monotonic()
    result = store.read(ns, p.keys, p.target_regions)
    assert time.monotonic() - started < 2.0
    assert set(result.outcomes) == {Outcome.LATE} and result.drain is None
    engine.resume.set()  # the engine now writes all eight pages, long after they were given up
    wait_for(lambda: store._link.client._worker is not None and len(engine.gets) >= 2, "late get ran")
    assert p.is_target_untouched
    assert store.metrics.snapshot().counters["remote_quarantined_lanes"] == 1


def test_a_failed_read_quarantines_its_lane_because_an_error_code_proves_nothing(
    fake_store: Make, pages: MakePages
) -> None:
    store, p = fake_store(remote_lanes=4, staging=4 << 20), pages(4)
    ns, engine, names = written(store, p)
    engine.failing.add(names[2])
    outcomes = store.read(ns, p.keys, p.target_regions).outcomes
    assert outcomes.count(Outcome.LOADED) == 3 and outcomes[2] is Outcome.READ_ERROR
    before = p.target.copy()
    engine.next_peer, other = "node-1", pages(64, seed=1)
    store.write(ns, other.keys, other.source_regions)
    engine.targets.clear()
    for _ in range(8):
        engine.deliver_late()
        assert set(store.read(ns, other.keys, other.target_regions).outcomes) == {Outcome.LOADED}
    assert engine.late[0][0] not in engine.targets, "the lane with the late write is not used again"
    assert (p.target == before).all() and (other.target == other.data).all()


def test_half_of_the_lanes_quarantined_replaces_the_worker_and_pages_come_back(
    fake_store: Make, pages: MakePages
) -> None:
    store, p = fake_store(remote_lanes=2), pages(2)
    ns, engine, names = written(store, p)
    first, objects = store._link.client._worker, engine.objects
    engine.failing.add(names[0])
    store.read(ns, p.keys, p.target_regions)
    wait_for(lambda: store._link.client._worker not in (None, first), "a new worker")
    assert engine.closed, "the old client is closed before its successor is used"
    assert FakeEngine.latest is not None and FakeEngine.latest is not engine
    FakeEngine.latest.objects.update(objects)
    store._link.negative.clear()
    store._link.peers.forgive({"node-0"})
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    assert store.metrics.snapshot().counters["remote_rebuilds"] == 1


def test_a_stuck_in_process_worker_is_not_reported_as_ended(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(2)
    ns, engine, names = written(store, p)
    engine.hanging.update(names)
    worker = store._link.client._worker
    assert worker is not None
    store.read(ns, p.keys, p.target_regions)
    assert not worker.kill(0.05)
    engine.resume.set()
    assert worker.kill(5.0)


def test_a_caller_in_a_hurry_does_not_cost_a_lane(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(remote_lanes=2, remote_deadline_s=10.0), pages(4)
    ns, engine, names = written(store, p)
    worker = store._link.client._worker
    assert worker is not None
    engine.hanging.update(names)
    for _ in range(2):  # both lanes are busy now
        assert set(store.read(ns, p.keys, p.target_regions, 0.02).outcomes) == {Outcome.LATE}
    assert store.hit_pages(ns, p.keys) == 4, "nobody is blamed for it"
    engine.resume.set()
    assert set(store.read(ns, p.keys, p.target_regions, 5.0).outcomes) == {Outcome.LOADED}
    assert worker.pool.quarantined == 0 and store._link.client._worker is worker


def test_a_busy_lane_whose_late_reply_is_an_error_is_quarantined(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(remote_lanes=4, remote_deadline_s=10.0), pages(4)
    ns, engine, names = written(store, p)
    worker = store._link.client._worker
    assert worker is not None
    engine.hanging.update(names)
    engine.failing.update(names)
    store.read(ns, p.keys, p.target_regions, 0.02)
    engine.resume.set()
    wait_for(lambda: _settled(store, worker), "the lane is quarantined")
    assert worker.pool.quarantined == 1


def _settled(store: RemoteStore, worker: Any) -> bool:
    lease = store._link.client.lease(time.monotonic() + 1.0)
    if lease is not None:
        store._link.client.give_back(*lease, is_clean=True)
    return bool(worker.pool.quarantined)


def test_a_full_pool_refuses_puts_at_once_while_reads_go_on(fake_store: Make, pages: MakePages) -> None:
    clock = Hand()
    store, p, more = fake_store(clock=clock), pages(4), pages(8, seed=1)
    ns, engine, _ = written(store, p)
    engine.capacity = len(engine.objects)
    assert set(store.write(ns, more.keys, more.source_regions).outcomes) == {WriteOutcome.FULL}
    puts = len(engine.puts)
    for _ in range(5):
        assert set(store.write(ns, more.keys, more.source_regions).outcomes) == {WriteOutcome.FULL}
    assert len(engine.puts) == puts, "no put goes out while backing off"
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    engine.capacity = 1 << 30
    clock.time += 0.25
    assert set(store.write(ns, more.keys, more.source_regions).outcomes) == {WriteOutcome.STORED}


def test_a_batch_that_meets_a_full_pool_stores_what_fits_and_stops_sending(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(staging=1 << 20, remote_lanes=2), pages(300)
    ns = store.namespace(p.fingerprint)
    engine = FakeEngine.latest
    assert engine is not None
    engine.capacity = len(engine.objects) + 10
    outcomes = store.write(ns, p.keys, p.source_regions).outcomes
    assert outcomes.count(WriteOutcome.STORED) == 10 and outcomes.count(WriteOutcome.FULL) == 290
    assert sum(map(len, engine.puts)) < 300


def test_a_page_that_could_not_be_read_is_not_offered_again_until_its_time_is_up(
    fake_store: Make, pages: MakePages
) -> None:
    clock = Hand()
    store, p = fake_store(remote_lanes=4, clock=clock), pages(6)
    ns, engine, names = written(store, p)
    engine.failing.add(names[2])
    store.read(ns, p.keys, p.target_regions)
    store._link.peers.forgive({"node-0"})
    assert store.hit_pages(ns, p.keys) == 2
    gets = len(engine.gets)
    assert store.read(ns, p.keys[2:3], p.target_regions.slice(2, 3)).outcomes == (Outcome.READ_ERROR,)
    assert len(engine.gets) == gets
    clock.time += 5.0
    assert store.hit_pages(ns, p.keys) == 6


def test_pages_of_a_node_that_was_shut_off_are_no_hits_and_cost_no_transfer(fake_store: Make, pages: MakePages) -> None:
    clock = Hand()
    store, p, q = fake_store(remote_lanes=4, clock=clock), pages(4), pages(4, seed=1)
    ns, engine, names = written(store, p)
    engine.next_peer = "node-1"
    store.write(ns, q.keys, q.source_regions)
    engine.failing.add(names[0])
    store.read(ns, p.keys[:1], p.target_regions.slice(0, 1))
    store._link.negative.clear()
    assert store.hit_pages(ns, p.keys) == 0 and store.hit_pages(ns, q.keys) == 4
    gets = len(engine.gets)
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.READ_ERROR}
    assert len(engine.gets) == gets
    assert set(store.read(ns, q.keys, q.target_regions).outcomes) == {Outcome.LOADED}
    engine.failing.clear()
    clock.time += 1.0
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}, "the probe, and then the rest"
    assert store.describe()["peers"] == {}


def test_an_unreachable_master_costs_nothing_once_the_breaker_is_open_and_pages_return(
    fake_store: Make, pages: MakePages
) -> None:
    clock = Hand()
    store, p = fake_store(clock=clock), pages(4)
    ns, engine, _ = written(store, p)
    engine.unreachable = True
    assert [store.hit_pages(ns, p.keys) for _ in range(3)] == [0, 0, 0]
    assert not store.is_healthy
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.READ_ERROR}
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.WRITE_ERROR}
    engine.unreachable = False
    assert store.hit_pages(ns, p.keys) == 0, "still open"
    clock.time += 1.0
    assert store.hit_pages(ns, p.keys) == 4 and store.is_healthy
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}


def test_a_half_open_breaker_is_probed_by_a_read_with_a_query_first(fake_store: Make, pages: MakePages) -> None:
    clock = Hand()
    store, p = fake_store(clock=clock), pages(4)
    ns, engine, _ = written(store, p)
    engine.unreachable = True
    for _ in range(3):
        store.hit_pages(ns, p.keys)
    clock.time += 1.0
    gets = len(engine.gets)
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.READ_ERROR}
    assert len(engine.gets) == gets
    engine.unreachable = False
    clock.time += 2.0
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}


def test_a_key_given_twice_is_one_page(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(2)
    ns = store.namespace(p.fingerprint)
    keys = [p.keys[0], p.keys[0]]
    assert store.write(ns, keys, p.source_regions).outcomes == (WriteOutcome.STORED, WriteOutcome.PRESENT)
    engine = FakeEngine.latest
    assert engine is not None and sum(map(len, engine.puts)) == 2  # the tenant's proof, and one page
    assert store.read(ns, keys, p.target_regions).outcomes == (Outcome.LOADED,) * 2
    assert (p.target == p.data[0]).all()


def test_why_absent_tells_evicted_and_mismatch_from_absent(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(4)
    ns, engine, names = written(store, p)
    other = store.namespace(Fingerprint("another model"))
    del engine.objects[names[1]]
    assert store.why_absent(ns, p.keys[:2]) == (Outcome.LOADED, Outcome.EVICTED)
    assert store.why_absent(other, p.keys[:1]) == (Outcome.MISMATCH,)
    assert store.why_absent(other, [b"?" * 32]) == (Outcome.ABSENT,)
    assert store.read(ns, p.keys, p.target_regions).outcomes[1] is Outcome.EVICTED


def test_clear_takes_the_namespace_and_leaves_others(fake_store: Make, pages: MakePages) -> None:
    store, p, q = fake_store(), pages(4), pages(4, seed=1, model="n")
    ns, _, _ = written(store, p)
    other, engine, _ = written(store, q)
    engine.objects["someone else's"] = b""
    assert store.remove(ns, p.keys[:1]) == 1
    assert store.clear(ns) == 3
    assert store.hit_pages(other, q.keys) == 4
    assert store.clear() == 4
    assert "someone else's" in engine.objects


def test_the_wrong_secret_is_refused_at_start_whatever_on_unavailable_says(
    fake_store: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for name in ("right", "wrong"):
        files.append(tmp_path / name)
        files[-1].write_bytes(name.encode() * 8)
        files[-1].chmod(0o600)
    fake_store(tenant="t", tenant_secret_file=str(files[0]))
    first = FakeEngine.latest
    assert first is not None
    original = FakeEngine.__init__

    def share_objects(self: FakeEngine, settings: dict[str, Any]) -> None:
        original(self, settings)
        self.objects = first.objects

    monkeypatch.setattr(FakeEngine, "__init__", share_objects)
    fake_store(tenant="t", tenant_secret_file=str(files[0]))
    with pytest.raises(ConfigError, match=r"tenant 't' .*127\.0\.0\.1:1 .*another secret.*tenant_secret_file"):
        fake_store(tenant="t", tenant_secret_file=str(files[1]), on_unavailable="degrade")


@pytest.mark.parametrize(("secret", "mode", "message"), [(b"short", 0o600, "5 bytes"), (b"x" * 32, 0o644, "chmod 600")])
def test_a_weak_or_readable_secret_file_is_refused(
    fake_store: Make, tmp_path: Any, secret: bytes, mode: int, message: str
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(secret)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        fake_store(tenant_secret_file=str(path))


def test_a_cluster_of_another_protocol_is_named_at_start(fake_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "get", lambda self, names, addrs, sizes: [-800] * len(names))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 could not be read over tcp.*same protocol"):
        fake_store()


def test_a_cluster_without_store_nodes_starts_with_a_warning(fake_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "pin", lambda self, names, addrs, sizes: [-200] * len(names))
    store = fake_store()
    assert "no store node with room" in store.describe()["warning"]


def test_calls_after_close_say_so_and_close_is_idempotent(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(1)
    ns = store.namespace(p.fingerprint)
    store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.read(ns, p.keys, p.target_regions)
    with pytest.raises(StoreClosedError):
        store.hit_pages(ns, p.keys)


def test_close_with_a_hung_call_is_bounded(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(2)
    ns, engine, names = written(store, p)
    engine.hanging.update(names)
    store.read(ns, p.keys, p.target_regions)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 15.0


def test_what_the_digest_covers_is_the_page_as_it_was_sent(fake_store: Make, pages: MakePages) -> None:
    store, p = fake_store(), pages(1)
    _, engine, names = written(store, p)
    stored = engine.objects[names[0]]
    assert stored[wire.HEADER_BYTES :] == np.ascontiguousarray(p.data[0]).tobytes()


def zero_copy(fake_store: Make, p: Any, **config: Any) -> RemoteStore:
    store = fake_store(remote_zero_copy=True, **config)
    assert store.register_memory(p.target.ctypes.data, p.target.nbytes)
    return store


def test_zero_copy_reads_into_registered_memory_without_the_ring_and_still_proves_every_page(
    fake_store: Make, pages: MakePages
) -> None:
    p = pages(300)
    store = zero_copy(fake_store, p)
    ns, engine, names = written(store, p)
    engine.targets.clear()
    damaged = bytearray(engine.objects[names[7]])
    damaged[500] ^= 1
    engine.objects[names[7]] = bytes(damaged)
    result = store.read(ns, p.keys, p.target_regions)
    assert result.outcomes.count(Outcome.LOADED) == 299 and result.outcomes[7] is Outcome.CORRUPT
    assert result.drain is None and engine.targets == []
    good = [i for i in range(300) if i != 7]
    assert (p.target[good] == p.data[good]).all()


def test_zero_copy_into_memory_that_was_not_offered_goes_through_the_ring(fake_store: Make, pages: MakePages) -> None:
    p, other = pages(8), pages(8)
    store = zero_copy(fake_store, other)
    ns, engine, _ = written(store, p)
    engine.targets.clear()
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    assert len(engine.targets) == 8
    assert not fake_store().register_memory(p.target.ctypes.data, p.target.nbytes), "off by default"


def test_zero_copy_pages_of_a_hung_read_drain_until_the_client_has_ended(fake_store: Make, pages: MakePages) -> None:
    p = pages(4)
    store = zero_copy(fake_store, p, remote_lanes=4)
    ns, engine, names = written(store, p)
    first = store._link.client._worker
    engine.hanging.update(names)
    result = store.read(ns, p.keys, p.target_regions)
    assert set(result.outcomes) == {Outcome.LATE} and result.draining == (0, 1, 2, 3)
    assert result.drain is not None and not result.drain.wait(0.05)
    engine.resume.set()  # the late bytes land in the host pages now: that is why they are draining
    assert result.drain.wait(10.0) and result.drain.is_done() and engine.closed
    wait_for(lambda: store._link.client._worker not in (None, first), "a new client")
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    store._link.negative.clear()
    store._link.peers.forgive({"node-0"})
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}


def test_zero_copy_pages_that_failed_drain_too(fake_store: Make, pages: MakePages) -> None:
    p = pages(4)
    store = zero_copy(fake_store, p, remote_lanes=4)
    ns, engine, names = written(store, p)
    engine.failing.add(names[2])
    result = store.read(ns, p.keys, p.target_regions)
    assert result.outcomes.count(Outcome.LOADED) == 3 and result.draining == (2,)
    assert result.drain is not None and result.drain.wait(10.0)


def test_with_an_arbiter_batches_are_small_and_one_at_a_time_and_reads_still_end_beside_pd(
    fake_store: Make, pages: MakePages
) -> None:
    name = f"test-{os.getpid()}"
    store, p = fake_store(arbiter=name, staging=8 << 20, remote_deadline_s=5.0), pages(100)
    arbiter = Arbiter(name)
    try:
        ns, engine, _ = written(store, p)
        assert max(map(len, engine.puts)) == 16
        with arbiter.pd(1):
            assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
        assert max(map(len, engine.gets)) == 16 and (p.target == p.data).all()
        described = store.describe()["arbiter"]
        assert described["name"] == name and described["waited_s"] > 0
    finally:
        arbiter.close(remove=True)
