"""What only an RDMA NIC can show. Collected with ``pytest -m rdma``; not run where there is none."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.remote.capability import active_rdma_ports
from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore

pytestmark = pytest.mark.rdma
KIB = 1 << 10
MakeStore = Callable[..., RemoteStore]
MakeCluster = Callable[..., LocalCluster]


@pytest.fixture(autouse=True)
def needs_nic() -> None:
    assert active_rdma_ports(), "these tests need an active RDMA port"


def test_auto_takes_rdma_and_pages_come_back(own_cluster: MakeCluster, remote_store: MakeStore, pages: Any) -> None:
    cluster = own_cluster(protocol="rdma")
    store, p = remote_store(cluster), pages(128, 256 * KIB)
    assert store.describe()["transport"]["effective"] == "rdma"
    ns = store.namespace(p.fingerprint)
    assert set(store.write(ns, p.keys, p.source_regions).outcomes) == {WriteOutcome.STORED}
    assert set(store.read(ns, p.keys, p.target_regions).outcomes) == {Outcome.LOADED}
    assert (p.target == p.data).all()


def test_a_cluster_of_the_other_protocol_is_named_at_start(own_cluster: MakeCluster, remote_store: MakeStore) -> None:
    for ours, theirs in (("rdma", "tcp"), ("tcp", "rdma")):
        cluster = own_cluster(protocol=theirs)
        with pytest.raises(ConfigError, match=f"over {ours}.*same protocol"):
            remote_store(cluster, transport=ours)


def test_a_killed_worker_leaves_no_late_byte_in_host_pages(
    own_cluster: MakeCluster, remote_store: MakeStore, pages: Any
) -> None:
    cluster = own_cluster(protocol="rdma")
    store, p = remote_store(cluster, remote_deadline_s=0.01), pages(512, 256 * KIB)
    ns = store.namespace(p.fingerprint)
    store.write(ns, p.keys, p.source_regions, 30.0)
    worker: Any = store.client_worker
    assert worker is not None
    store.read(ns, p.keys, p.target_regions)
    assert worker.kill(10.0)
    before = p.target.copy()
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert (p.target == before).all()


def test_a_killed_node_costs_a_deadline_at_most(own_cluster: MakeCluster, remote_store: MakeStore, pages: Any) -> None:
    cluster = own_cluster(protocol="rdma", client_ttl_s=2)
    store, p = remote_store(cluster), pages(64, 256 * KIB)
    ns = store.namespace(p.fingerprint)
    store.write(ns, p.keys, p.source_regions)
    cluster.of_kind("client")[0].end(signal.SIGKILL)
    started = time.monotonic()
    assert Outcome.LOADED not in store.read(ns, p.keys, p.target_regions).outcomes
    assert time.monotonic() - started < 2.5
