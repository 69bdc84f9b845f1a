"""Models with more pools than KV: SGLang's own fixtures and controller, the v2 calls, byte for byte."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def hybrid(kit):
    import hybrid_kit

    return hybrid_kit


def keys_of(pool_name, storage):
    """(namespace, key) of every page of one pool."""
    ns = storage._channels[pool_name].namespace
    return ns, [key for key, _ in storage.store.iter_pages(ns)]


@pytest.mark.parametrize("kind", ["swa", "mamba"])
def test_window_and_state_come_back_with_the_kv_pages(hybrid, nvme, kind):
    writer = hybrid.HybridNode(kind, nvme)
    tokens = writer.tokens(8)
    writer.produce(tokens, seed=5)
    writer.close()
    reader = hybrid.HybridNode(kind, nvme)
    assert reader.prefetch(tokens) == len(tokens)
    compared, differing = reader.differing_buffers(tokens, seed=5)
    assert compared > 12
    assert differing == []
    reader.close()


@pytest.mark.parametrize("kind", ["swa", "mamba"])
def test_without_its_side_pool_no_prefix_is_restored(hybrid, nvme, kind):
    writer = hybrid.HybridNode(kind, nvme)
    tokens = writer.tokens(8)
    writer.produce(tokens)
    ns, keys = keys_of(kind, writer.storage)
    assert writer.storage.store.remove(ns, keys) == len(keys) > 0
    writer.close()
    reader = hybrid.HybridNode(kind, nvme)
    assert reader.prefetch(tokens) == 0
    reader.close()


@pytest.mark.parametrize("kind", ["swa", "mamba"])
def test_corruption_of_what_only_v2_reads_is_a_counted_miss(hybrid, nvme, kind):
    writer = hybrid.HybridNode(kind, nvme)
    tokens = writer.tokens(8)
    writer.produce(tokens)
    ns, keys = keys_of(kind, writer.storage)
    positions = flip_pages(writer.storage.store, ns, keys)
    assert positions == len(keys)
    writer.close()
    reader = hybrid.HybridNode(kind, nvme)
    assert reader.prefetch(tokens) == 0
    assert reader.storage.describe()["read_outcomes"].get("corrupt", 0) > 0
    reader.close()


def flip_pages(store, ns, keys):
    """Find each page in the segment files by its bytes and flip one bit of it; returns how many."""
    import numpy as np

    from sglang_hicache_ext.page import regions_of_array

    sizes, flipped = dict(store.iter_pages(ns)), 0
    segments = [s for root in store.describe()["path"] for s in sorted(Path(root).rglob("*.seg"))]
    for key in keys:
        page = np.zeros((1, sizes[key]), np.uint8)
        assert store.read(ns, [key], regions_of_array(page)).outcomes == ("loaded",)
        for segment in segments:
            place = segment.read_bytes().find(page.tobytes())
            if place >= 0:
                with open(segment, "r+b") as f:
                    f.seek(place)
                    f.write(bytes([page[0, 0] ^ 1]))
                flipped += 1
                break
    return flipped


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_an_indexer_shorter_than_the_kv_pool_cuts_the_prefix(kit, nvme, layout):
    shape = kit.Shape("dsa", layout, 64)
    tokens = list(range(1, shape.tokens + 1))
    writer = kit.Node(shape, "nvme", nvme)
    node = writer.produce(tokens, seed=2)
    hashes = writer.tree.tree_core.get_hash_values(node)
    ns, keys = keys_of("indexer", writer.storage)
    gone = [bytes.fromhex(h) for h in hashes[4:]]
    assert set(gone) < set(keys)
    assert writer.storage.store.remove(ns, gone) == 2
    writer.close()
    reader = kit.Node(shape, "nvme", nvme)
    assert reader.prefetch(tokens) == 4 * 64
    assert reader.differing_buffers(tokens[: 4 * 64], seed=2, produced=len(tokens)) == []
    reader.close()


@pytest.mark.parametrize("pool", ["mha", "mla"])
def test_a_draft_pool_beside_the_kv_pool_comes_back_with_it(kit, nvme, pool):
    shape = kit.Shape(pool, "page_first", 16, draft=True)
    tokens = list(range(1, shape.tokens + 1))
    writer = kit.Node(shape, "nvme", nvme)
    writer.produce(tokens, seed=4)
    assert set(writer.storage.describe()["pools"]) == {"kv", "draft"}
    writer.close()
    reader = kit.Node(shape, "nvme", nvme)
    assert reader.prefetch(tokens) == len(tokens)
    assert reader.differing_buffers(tokens, seed=4) == []
    reader.close()


def test_every_rank_writes_its_shard_of_a_draft_beside_a_replicated_target(kit, nvme):
    """SGLang alone writes it from rank 0 only, and then no rank but that one ever hits."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    node = kit.Node(kit.Shape("mla", "page_first", 16, draft=True), "nvme", nvme)
    controller = node.controller
    config = controller.storage_config
    controller.storage_config = type(config)(**{**vars(config), "tp_rank": 1, "tp_size": 2})
    assert controller.backup_skip
    assert controller.should_backup(PoolTransfer(name=PoolName.DRAFT))
    assert not controller.should_backup(PoolTransfer(name=PoolName.INDEXER))
    controller.storage_backend_type = "file"
    assert not controller.should_backup(PoolTransfer(name=PoolName.DRAFT))
    controller.storage_backend_type, controller.storage_config = "nvme", config
    node.close()
