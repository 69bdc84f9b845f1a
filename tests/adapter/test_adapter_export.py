"""The series of one real backend: every page in one outcome, the path in use, what is in flight."""

import dataclasses
import threading

import prometheus_client
import pytest

from sglang_hicache_ext.exporter import Exporter, series_names
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.sglang_adapter import exporting
from sglang_hicache_ext.sglang_adapter.guard import Guard

torch = pytest.importorskip("torch")

KEYS = [f"{i:064x}" for i in range(8)]
LABELS = {"storage_backend": "nvme", "tp_rank": "0", "tier": ""}


@pytest.fixture
def registry():
    yield prometheus_client.CollectorRegistry()
    Exporter._made.clear()


@pytest.fixture
def storage(kit, nvme):
    node = kit.Node(kit.Shape("mha", "page_first", 16), "nvme", nvme)
    yield node.storage, node.host_pool
    node.close()


def indices(pool, pages, start=0):
    return torch.arange(start * pool.page_size, (start + pages) * pool.page_size)


def test_the_outcomes_of_a_backend_sum_up_to_the_pages_queried(storage, registry):
    backend, pool = storage
    export = exporting.BackendExport(backend, LABELS, registry=registry)
    assert backend.batch_set_v1(KEYS[:6], indices(pool, 6)) == [True] * 6
    assert backend.batch_get_v1(KEYS, indices(pool, 8, 8)) == [True] * 6 + [False] * 2
    export.tick(lambda: 100.0)
    assert export.wait(30)

    def value(name, **own):
        return registry.get_sample_value(f"sglang:{name}", {**LABELS, **own}) or 0.0

    outcomes = [s for f in registry.collect() for s in f.samples if s.name == "sglang:hicache_ext_pages_total"]
    assert sum(s.value for s in outcomes) == 8
    assert value("hicache_ext_pages_total", outcome="loaded") == 6
    assert value("hicache_ext_pages_total", outcome="absent") == 2
    assert value("hicache_ext_page_writes_total", outcome="stored") == 6
    assert value("hicache_ext_stored_pages") == 6
    assert value("hicache_ext_used_bytes") > 0
    assert value("hicache_ext_healthy") == 1
    assert value("hicache_ext_batch_seconds_count", operation="read") == 1
    (path,) = [s for f in registry.collect() for s in f.samples if s.name == "sglang:hicache_ext_path_info"]
    assert path.labels["engine_requested"] == "auto"
    assert path.labels["engine"] in ("io_uring", "posix", "aiofiles")
    seen = {s.name for f in registry.collect() for s in f.samples if not s.name.endswith("_created")}
    assert seen <= series_names()
    export.close()


def test_a_look_is_taken_once_a_second_at_most(storage, registry):
    backend, _ = storage
    export = exporting.BackendExport(backend, LABELS, registry=registry)
    looks = []
    export._exporter.publish = looks.append
    for now in (10.0, 10.5, 10.99, 11.0, 11.2):
        export.tick(lambda now=now: now)
        assert export.wait(30)
    assert len(looks) == 2
    export.close()


def test_a_look_that_hangs_holds_up_neither_the_scheduler_nor_a_second_look(storage, registry):
    backend, _ = storage
    export = exporting.BackendExport(backend, LABELS, registry=registry)
    inside, leave, looks = threading.Event(), threading.Event(), []

    def hang(reading):
        looks.append(reading)
        inside.set()
        leave.wait(30)

    export._exporter.publish = hang
    for now in (10.0, 20.0, 30.0):
        export.tick(lambda now=now: now)
        assert inside.wait(30)
    assert len(looks) == 1
    leave.set()
    assert export.wait(30)
    export.close()


def test_an_extension_that_is_off_says_so(storage, registry):
    backend, _ = storage
    export = exporting.BackendExport(backend, LABELS, registry=registry)
    backend._guard.disabled = "batch_get_v1: a page was freed twice"
    export.tick(lambda: 100.0)
    assert export.wait(30)
    assert registry.get_sample_value("sglang:hicache_ext_healthy", LABELS) == 0
    export.close()


def test_the_export_opens_only_with_metrics_and_get_stats_drives_it(storage, kit, nvme, tmp_path):
    from sglang_hicache_ext.sglang_adapter.storage import HiCacheExtStorage

    backend, pool = storage
    config = backend_config(kit, pool, nvme, tmp_path)
    assert exporting.open_export(backend, dataclasses.replace(config, enable_storage_metrics=False)) is None
    measured = HiCacheExtStorage(dataclasses.replace(config, enable_storage_metrics=True), {})
    measured.register_mem_pool_host(pool)
    measured.batch_set_v1(KEYS, indices(pool, 8))
    assert measured.get_stats() is not None
    assert measured._export.wait(30)
    stored = prometheus_client.REGISTRY.get_sample_value("sglang:hicache_ext_stored_pages", LABELS)
    assert stored == 8
    measured.close()


def backend_config(kit, pool, nvme, tmp_path):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True, "model_name": "tiny",
        "extra_config": {**nvme, "path": str(tmp_path / "other"), "interface_v1": 1, "backend_name": "nvme"},
    }  # fmt: skip
    return HiCacheStorageConfig(**given)


def test_the_oldest_call_in_flight_is_named_with_its_age():
    guard = Guard(Metrics())
    inside, leave = threading.Event(), threading.Event()

    def slow():
        inside.set()
        leave.wait(30)
        return 1

    thread = threading.Thread(target=lambda: guard.run("batch_get_v1", int, slow))
    thread.start()
    assert inside.wait(30)
    name, seconds = guard.oldest_inflight()
    assert name == "batch_get_v1"
    assert seconds >= 0
    assert guard.oldest_inflight("batch_get_v1") == ("", 0.0)
    leave.set()
    thread.join(30)
    assert guard.oldest_inflight() == ("", 0.0)


def test_the_prefix_is_read_from_sglangs_own_collector():
    assert exporting.metric_prefix() == "sglang:"
    assert exporting.metric_prefix("no_such_module_here") == "sglang:"


def test_the_tiers_of_a_tiered_store_are_exported_beside_the_whole(storage, registry, monkeypatch):
    from sglang_hicache_ext.config import HiCacheExtConfig
    from sglang_hicache_ext.storage_backends.memory import MemoryStore
    from sglang_hicache_ext.storage_backends.tiered import TieredStore

    backend, pool = storage
    tiered = TieredStore(HiCacheExtConfig(), near=MemoryStore(), far=MemoryStore())
    whole = backend.store
    monkeypatch.setattr(backend, "store", tiered)
    monkeypatch.setattr(backend._channels["kv"], "_store", tiered)
    backend._channels["kv"]._namespaces.clear()
    export = exporting.BackendExport(backend, LABELS, registry=registry)
    assert backend.batch_set_v1(KEYS[:6], indices(pool, 6)) == [True] * 6
    assert tiered.flush(30)
    tiered.near.remove(backend._channels["kv"].namespace, [bytes.fromhex(KEYS[0])])
    assert backend.batch_get_v1(KEYS[:6], indices(pool, 6, 8)) == [True] * 6
    export.tick(lambda: 100.0)
    assert export.wait(30)

    def loaded(tier):
        labels = {**LABELS, "tier": tier, "outcome": "loaded"}
        return registry.get_sample_value("sglang:hicache_ext_pages_total", labels)

    moved = 6  # the near tier is also read to send pages on to the far one
    assert (loaded(""), loaded("near"), loaded("far")) == (6, 5 + moved, 1)
    assert registry.get_sample_value("sglang:hicache_ext_stored_pages", {**LABELS, "tier": "far"}) == 6
    export.close()
    tiered.close()
    monkeypatch.setattr(backend, "store", whole)
