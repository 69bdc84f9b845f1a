"""The real thing: mooncake_master, store nodes and clients on loopback, and what happens when they hang, die or lie."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.errors import CapabilityError, ConfigError
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster, Node, free_port, wait_until
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
KIB = 1 << 10
MakeStore = Callable[..., RemoteStore]
MakeCluster = Callable[..., LocalCluster]


def stored(store: RemoteStore, p: Any) -> Any:
    ns = store.namespace(p.fingerprint)
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    return ns


def no_wrong_byte(outcomes: tuple[Outcome, ...], p: Any) -> None:
    for row, outcome in enumerate(outcomes):
        assert outcome is not Outcome.LOADED or (p.target[row] == p.data[row]).all()


def back_again(store: RemoteStore, ns: Any, p: Any, timeout_s: float) -> float:
    """Seconds until every page of ``p`` is served again; no byte is wrong on the way."""

    def check() -> bool:
        if store.hit_pages(ns, p.keys) < len(p.keys):
            return False
        outcomes = store.read(ns, p.keys, p.target_regions).outcomes
        no_wrong_byte(outcomes, p)
        return set(outcomes) == {Outcome.LOADED}

    return wait_until(check, timeout_s, "pages come back")


def test_one_process_writes_and_another_reads(
    shared_cluster: LocalCluster, remote_store: MakeStore, pages: Any
) -> None:
    writer, reader, p = remote_store(shared_cluster), remote_store(shared_cluster), pages(128, 64 * KIB)
    ns = stored(writer, p)
    assert reader.hit_pages(reader.namespace(p.fingerprint), p.keys) == 128
    assert set(reader.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    assert (p.target == p.data).all()
    assert set(writer.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.PRESENT}
    assert reader.remove(ns, p.keys[:1]) == 1
    assert writer.read(ns, p.keys[:2], p.target_regions.slice(0, 2)).outcomes == (Outcome.EVICTED, Outcome.LOADED)
    assert writer.describe()["transport"]["effective"] == "tcp"


def test_tenants_cannot_name_each_others_pages(
    shared_cluster: LocalCluster, remote_store: MakeStore, pages: Any, tmp_path: Path
) -> None:
    stores, p = [], pages(8, seed=5)
    for name in ("a", "b"):
        secret = tmp_path / name
        secret.write_bytes(name.encode() * 32)
        secret.chmod(0o600)
        stores.append(remote_store(shared_cluster, tenant=name, tenant_secret_file=str(secret)))
    ns = stored(stores[0], p)
    stores[1].namespace(p.fingerprint)
    assert stores[1].hit_pages(ns, p.keys) == 0
    assert set(stores[1].read(ns, p.keys, p.target_regions).outcomes) == {Outcome.ABSENT}
    assert stores[1].clear() == 0 and stores[0].hit_pages(ns, p.keys) == 8


def test_the_wrong_tenant_secret_is_refused_with_the_address_and_what_to_check(
    shared_cluster: LocalCluster, remote_store: MakeStore, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"r" * 32)
    secret.chmod(0o600)
    options = {"tenant": "guarded", "tenant_secret_file": str(secret)}
    remote_store(shared_cluster, **options)
    secret.write_bytes(b"w" * 32)
    with pytest.raises(ConfigError, match=rf"{re.escape(shared_cluster.master_address)} .*tenant_secret_file"):
        remote_store(shared_cluster, **options)


def test_an_unreachable_master_is_one_message_in_little_time(needs_mooncake: None) -> None:
    from sglang_hicache_ext.config import HiCacheExtConfig

    address = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"master {address} cannot be reached.*mooncake_master"):
        RemoteStore(HiCacheExtConfig.parse({"master": address}))
    assert time.monotonic() - started < 3.0


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="there is an RDMA device here")
def test_rdma_without_a_nic_fails_at_start_and_says_why(needs_mooncake: None) -> None:
    from sglang_hicache_ext.config import HiCacheExtConfig

    with pytest.raises(CapabilityError, match=r"no RDMA port .* transport: tcp"):
        RemoteStore(HiCacheExtConfig.parse({"master": "127.0.0.1:1", "transport": "rdma"}))


def watch_for_changes(p: Any, before: np.ndarray, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (changed := int((p.target != before).sum())) == 0:
        time.sleep(0.02)
    return changed


def test_a_hung_node_costs_one_deadline_and_writes_no_byte_into_any_host_page_afterwards(
    own_cluster: MakeCluster, remote_store: MakeStore, pages: Any
) -> None:
    cluster = own_cluster(client_ttl_s=30)
    store, p = remote_store(cluster), pages(64, 256 * KIB)
    ns = stored(store, p)
    node = cluster.of_kind("client")[0]
    node.send(signal.SIGSTOP)
    started = time.monotonic()
    result = store.read(ns, p.keys, p.target_regions)
    took = time.monotonic() - started
    assert 1.9 < took < 2.5, "the default deadline is 2 s"
    assert set(result.outcomes) == {Outcome.LATE} and result.drain is None
    started = time.monotonic()
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.READ_ERROR}
    assert store.hit_pages(ns, p.keys) == 0
    assert time.monotonic() - started < 0.5, "the second request does not pay for the same node again"
    before = p.target.copy()
    node.send(signal.SIGCONT)
    assert watch_for_changes(p, before, 2.0) == 0
    recovered = back_again(store, ns, p, 30.0)
    print(f"hung node: read ended after {took:.2f} s; pages back {recovered + 2.0:.1f} s after it resumed")


PLAIN = """
import ctypes, mmap, os, sys, threading, time
from mooncake.store import MooncakeDistributedStore
master, names, nbytes = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
memory = mmap.mmap(-1, nbytes * len(names))
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert store.register_buffer(base, len(memory)) == 0
addrs = [base + i * nbytes for i in range(len(names))]
print("ready", flush=True); sys.stdin.readline()
threading.Thread(target=store.batch_get_into, args=(names, addrs, [nbytes] * len(names)), daemon=True).start()
time.sleep(2.0)                        # a deadline around the plain call: given up, the page goes to someone else
memory[:] = bytes([7]) * len(memory)
print("given up", flush=True); sys.stdin.readline()
deadline = time.monotonic() + 5.0
while time.monotonic() < deadline and memory[:] == bytes([7]) * len(memory):
    time.sleep(0.02)
print(sum(b != 7 for b in memory[:]), flush=True); os._exit(0)
"""


def test_the_test_above_fails_against_the_plain_engine(
    own_cluster: MakeCluster, remote_store: MakeStore, pages: Any
) -> None:
    cluster = own_cluster(client_ttl_s=30)
    store, p = remote_store(cluster), pages(16, 256 * KIB)
    ns = stored(store, p)
    names = ",".join(store._names.names(ns.id, p.keys))
    node = cluster.of_kind("client")[0]
    child = subprocess.Popen(
        [sys.executable, "-c", PLAIN, cluster.master_address, names, str(256 * KIB + 64)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        node.send(signal.SIGSTOP)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "given up\n"
        node.send(signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        overwritten = int(child.stdout.readline())
    finally:
        child.kill()
        child.wait(10)
        child.stdin.close()
        child.stdout.close()
    print(f"plain engine: {overwritten} bytes of the given-up buffer were overwritten late")
    assert overwritten > 0


def flip_in_memory(node: Node, needle: bytes, offset: int) -> int:
    """Flip one bit ``offset`` bytes behind every occurrence of ``needle`` in the node's memory; how many."""
    flipped = 0
    maps = Path(f"/proc/{node.process.pid}/maps").read_text().splitlines()
    with open(f"/proc/{node.process.pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            start, end = (int(x, 16) for x in span.split("-"))
            if not mode.startswith("rw") or end - start < 16 << 20:
                continue
            memory.seek(start)
            content = memory.read(end - start)
            at = content.find(needle)
            while at >= 0:
                memory.seek(start + at + offset)
                memory.write(bytes([content[at + offset] ^ 0x40]))
                flipped += 1
                at = content.find(needle, at + 1)
    return flipped


def test_every_page_flipped_in_the_nodes_memory_is_detected_and_none_delivered(
    own_cluster: MakeCluster, remote_store: MakeStore, pages: Any
) -> None:
    cluster = own_cluster(node_bytes=64 << 20)
    store, p = remote_store(cluster), pages(64, 64 * KIB)
    ns = stored(store, p)
    assert flip_in_memory(cluster.of_kind("client")[0], b"HXremote", 64 + 12345) == 64
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.CORRUPT}
    counters = store.stats().counters
    assert counters["remote_corrupt_pages"] == counters["remote_removed_pages"] == 64
    assert not store.contains(ns, p.keys).any(), "what was proven bad is gone"
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    assert (p.target == p.data).all()


def test_a_full_pool_makes_puts_back_off_and_leaves_prefetch_alone(
    own_cluster: MakeCluster, remote_store: MakeStore, pages: Any
) -> None:
    cluster = own_cluster(node_bytes=48 << 20, lease_ms=60_000)
    store, p, flood = remote_store(cluster), pages(32, 256 * KIB), pages(256, 256 * KIB, seed=9)
    ns = stored(store, p)
    assert store.hit_pages(ns, p.keys) == 32  # takes the lease: these pages may not be evicted
    refused, times = 0, []
    for _ in range(6):
        for start in range(0, 256, 32):
            part = flood.source_regions.slice(start, start + 32)
            refused += store.write(ns, flood.keys[start : start + 32], part).outcomes.count(WriteOutcome.FULL)
        started = time.monotonic()
        outcomes = store.read(ns, p.keys, p.target_regions).outcomes
        times.append(time.monotonic() - started)
        assert set(outcomes) == {Outcome.LOADED} and (p.target == p.data).all()
    assert refused > 0 and store.metrics.snapshot().counters["remote_put_refused_pages"] >= refused
    assert max(times) < 1.0
    print(f"full pool: {refused} puts refused, slowest read {max(times) * 1e3:.0f} ms")


def test_a_killed_node_degrades_to_misses_and_the_pool_comes_back(
    own_cluster: MakeCluster, remote_store: MakeStore, pages: Any
) -> None:
    cluster = own_cluster(client_ttl_s=2)
    store, p = remote_store(cluster), pages(64, 64 * KIB)
    ns = stored(store, p)
    cluster.of_kind("client")[0].end()
    killed = time.monotonic()
    outcomes = store.read(ns, p.keys, p.target_regions).outcomes
    assert Outcome.LOADED not in outcomes and time.monotonic() - killed < 3.0
    cluster.add_node()

    def rewritten() -> bool:
        return all(o.is_stored for o in store.write(ns, p.keys, p.source_regions).outcomes) and (
            store.hit_pages(ns, p.keys) == 64
        )

    wait_until(rewritten, 30.0, "the pool takes pages again")
    back_again(store, ns, p, 30.0)
    print(f"killed node: new pages are served {time.monotonic() - killed:.1f} s after the kill")


def test_a_killed_master_degrades_to_misses_and_comes_back(
    own_cluster: MakeCluster, remote_store: MakeStore, pages: Any
) -> None:
    cluster = own_cluster(client_ttl_s=5)
    store, p = remote_store(cluster), pages(64, 64 * KIB)
    ns = stored(store, p)
    master = cluster.of_kind("master")[0]
    master.end()
    for _ in range(5):
        started = time.monotonic()
        assert store.hit_pages(ns, p.keys) == 0
        no_wrong_byte(store.read(ns, p.keys, p.target_regions).outcomes, p)
        assert time.monotonic() - started < 5.0
    started = time.monotonic()
    assert store.hit_pages(ns, p.keys) == 0 and time.monotonic() - started < 0.05, "the breaker is open"
    cluster.add_master(master.port)
    restarted = time.monotonic()

    def rewritten() -> bool:
        return all(o.is_stored for o in store.write(ns, p.keys, p.source_regions).outcomes)

    wait_until(rewritten, 60.0, "the pool takes pages again")
    back_again(store, ns, p, 30.0)
    print(f"killed master: pages are served again {time.monotonic() - restarted:.1f} s after its restart")


@pytest.mark.timeout(180)
def test_an_etcd_fail_over_keeps_every_page(own_cluster: MakeCluster, remote_store: MakeStore, pages: Any) -> None:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (apt install etcd-server)")
    cluster = own_cluster(masters=2, client_ttl_s=20)
    store, p = remote_store(cluster), pages(64, 64 * KIB)
    ns = stored(store, p)
    masters = cluster.of_kind("master")
    leader = next(m for m in masters if "mount_segment" in m.log.read_text(errors="replace"))
    (standby,) = (m for m in masters if m is not leader)
    wait_until(lambda: standby.metric("ha_oplog_applied_sequence_id") >= 65, 20.0, "the standby has every page")
    leader.end()
    killed = time.monotonic()
    outcomes = store.read(ns, p.keys, p.target_regions).outcomes
    no_wrong_byte(outcomes, p)
    back_again(store, ns, p, 60.0)
    assert (p.target == p.data).all()
    print(
        f"etcd fail-over: all 64 pages are served again {time.monotonic() - killed:.1f} s after the leader was killed"
    )


def test_reads_and_writes_from_many_threads_never_mix_pages(
    shared_cluster: LocalCluster, remote_store: MakeStore, pages: Any
) -> None:
    store = remote_store(shared_cluster)
    sets = [pages(24, 64 * KIB, seed=100 + i) for i in range(6)]
    ns = store.namespace(sets[0].fingerprint)
    problems: list[str] = []

    def work(p: Any) -> None:
        for _ in range(4):
            store.write(ns, p.keys, p.source_regions)
            p.target[:] = 0
            outcomes = store.read(ns, p.keys, p.target_regions).outcomes
            if any(o is Outcome.LOADED and (p.target[i] != p.data[i]).any() for i, o in enumerate(outcomes)):
                problems.append("wrong byte")
            if outcomes.count(Outcome.LOADED) != 24:
                problems.append(str(set(outcomes)))

    threads = [threading.Thread(target=work, args=(p,)) for p in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(t.is_alive() for t in threads) and not problems


ZERO_COPY = """
import os, sys
import numpy as np
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore
store = RemoteStore(HiCacheExtConfig.parse({"master": sys.argv[1], "staging": 64 << 20, "remote_zero_copy": True}))
data = np.random.default_rng(3).integers(0, 256, (64, 65536), dtype=np.uint8)
target = np.zeros_like(data)
keys = [bytes([i]) * 32 for i in range(64)]
ns = store.namespace(Fingerprint("zero copy"))
assert store.register_memory(target.ctypes.data, target.nbytes)
assert all(o.is_stored for o in store.write(ns, keys, regions_of_array(data)).outcomes)
result = store.read(ns, keys, regions_of_array(target, (40000, 25536)))
assert set(result.outcomes) == {"loaded"} and (target == data).all(), result
store.close()
print("same bytes", flush=True)
os._exit(0)
"""


def test_zero_copy_delivers_the_same_bytes(shared_cluster: LocalCluster) -> None:
    command = [sys.executable, "-c", ZERO_COPY, shared_cluster.master_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "same bytes", done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_bytes_flipped_on_a_nodes_ssd_are_detected_and_none_delivered(
    own_cluster: MakeCluster, remote_store: MakeStore, pages: Any
) -> None:
    cluster = own_cluster(node_bytes=64 << 20, offload=True, client_ttl_s=3)
    store, p = remote_store(cluster), pages(64, 256 * KIB)
    ns = stored(store, p)
    node = cluster.of_kind("client")[0]

    def on_ssd() -> int:
        return sum(f.stat().st_size for f in cluster.folder.glob("ssd*/**/*") if f.is_file())

    wait_until(lambda: on_ssd() >= 0.9 * p.data.nbytes, 60.0, "the node has written its pages to the SSD")
    node.end()
    for file in cluster.folder.glob("ssd*/**/*"):
        if file.is_file() and file.stat().st_size > 1 << 20:
            raw = bytearray(file.read_bytes())
            raw[100_000::128_000] = bytes(b ^ 0x55 for b in raw[100_000::128_000])
            file.write_bytes(raw)
    wait_until(lambda: store.hit_pages(ns, p.keys) == 0, 30.0, "the master has given up on the node")
    cluster.restart_node(node)
    wait_until(lambda: bool(store.contains(ns, p.keys).any()), 60.0, "the node offers pages from its SSD again")
    outcomes = store.read(ns, p.keys, p.target_regions).outcomes
    no_wrong_byte(outcomes, p)
    assert Outcome.CORRUPT in outcomes
    print(f"SSD: {outcomes.count(Outcome.CORRUPT)} corrupt, {outcomes.count(Outcome.LOADED)} good, none wrong")
