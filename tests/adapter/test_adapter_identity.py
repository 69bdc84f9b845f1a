"""What is stored under one identity is a miss under any other."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

KEYS = [f"{i:064x}" for i in range(4)]


def indices(node, pages):
    return torch.arange(pages * node.host_pool.page_size)


@pytest.fixture
def written(kit, nvme):
    node = kit.Node(kit.Shape("mha", "page_first", 16), "nvme", nvme)
    assert node.storage.batch_set_v1(KEYS, indices(node, 4)) == [True] * 4
    yield node
    node.close()


def hits_of(node):
    return node.storage.batch_exists(KEYS), node.storage.batch_get_v1(KEYS, indices(node, 4))


@pytest.mark.parametrize(
    "shape", [("mha", "layer_first", 16), ("mha", "page_first_direct", 16), ("mha", "page_first", 64)]
)
def test_another_layout_or_page_size_is_a_miss(kit, nvme, written, shape):
    other = kit.Node(kit.Shape(*shape), "nvme", nvme)
    assert hits_of(other) == (0, [False] * 4)
    other.close()


def test_the_operators_namespace_adds_to_the_identity(kit, nvme, written):
    other = kit.Node(kit.Shape("mha", "page_first", 16), "nvme", {**nvme, "namespace": "blue"})
    assert hits_of(other) == (0, [False] * 4)
    other.close()
    same = kit.Node(kit.Shape("mha", "page_first", 16), "nvme", nvme)
    assert hits_of(same) == (4, [True] * 4)
    same.close()


CHANGES = [
    {"weights": "other"},
    {"config_hash": "other"},
    {"adapters": "other"},
    {"tp": "1/2"},
    {"pp": "1/2"},
    {"cp": "1/2"},
    {"namespace": "x"},
    {"extra": {"kv_cache_dtype": "fp8_e4m3"}},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_fact_of_the_deployment_keeps_pages_apart(written, change):
    channel = written.storage._channels["kv"]
    changed = replace(channel._deployment, **change)
    assert fingerprint(channel, changed) != fingerprint(channel, channel._deployment)


def fingerprint(channel, deployment, weights=None, epoch=""):
    from sglang_hicache_ext.sglang_adapter.identity import pool_fingerprint

    return pool_fingerprint(deployment, channel.pool, "kv", channel.pages, weights=weights, epoch=epoch).namespace_id


def test_the_shards_of_all_ranks_have_names_of_their_own(written):
    channel = written.storage._channels["kv"]
    names = {
        fingerprint(channel, replace(channel._deployment, tp=tp, pp=pp, cp=cp))
        for tp in ("-", "0/2", "1/2", "1/4")
        for pp in ("-", "0/2", "1/2")
        for cp in ("-", "0/2", "1/2")
    }
    assert len(names) == 4 * 3 * 3


def test_a_replicated_pool_has_one_name_on_every_rank_and_its_sharded_sidecars_do_not(kit, nvme, written):
    from sglang_hicache_ext.sglang_adapter.identity import is_sharded

    mla = kit.Node(kit.Shape("mla", "page_first", 16), "nvme", nvme)
    channel = mla.storage._channels["kv"]
    ranks = [replace(channel._deployment, is_replicated=True, tp=f"{r}/2") for r in (0, 1)]
    assert fingerprint(channel, ranks[0]) == fingerprint(channel, ranks[1])
    assert is_sharded(ranks[0], channel.pool, "mamba")
    assert is_sharded(ranks[0], written.host_pool, "draft")
    assert not is_sharded(ranks[0], channel.pool, "draft")
    mla.close()


def test_a_draft_model_is_part_of_the_identity_of_its_pool_only(written):
    from sglang_hicache_ext.sglang_adapter.identity import pool_fingerprint

    channel = written.storage._channels["kv"]

    def of(name, draft):
        deployment = replace(channel._deployment, draft=draft)
        return pool_fingerprint(deployment, channel.pool, name, channel.pages, weights=None, epoch="").namespace_id

    assert of("draft", "a") != of("draft", "b")
    assert of("kv", "a") == of("kv", "b")


def test_a_weight_update_hides_old_pages_and_its_end_shows_no_mixed_ones(written, monkeypatch):
    from sglang_hicache_ext.sglang_adapter import epoch as epochs
    from sglang_hicache_ext.sglang_adapter.epoch import WeightEpoch

    epoch = WeightEpoch()
    monkeypatch.setattr(written.storage._channels["kv"], "_epoch", epoch)
    monkeypatch.setattr(epochs, "CURRENT", epoch)
    assert written.storage.batch_exists(KEYS) == 4
    epoch.begin_update("token", 10)
    assert hits_of(written) == (0, [False] * 4)
    assert written.storage.batch_set_v1(KEYS[:1], indices(written, 1)) == [True]
    epoch.flushed(11)
    assert written.storage.batch_exists(KEYS) == 0
    with epoch.pinned(5) as is_current:
        assert not is_current
