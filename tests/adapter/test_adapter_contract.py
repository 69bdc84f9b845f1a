"""Every method that SGLang calls, on every early return: the right type, the right length, never an exception."""

import pytest

torch = pytest.importorskip("torch")

KEYS = [f"{i:064x}" for i in range(5)]
METHODS = ("batch_exists", "batch_get_v1", "batch_set_v1", "batch_get", "batch_set", "get", "set", "exists")


@pytest.fixture
def node(kit, nvme):
    made = kit.Node(kit.Shape("mha", "page_first", 16), "nvme", nvme)
    yield made
    made.close()


def indices(node, pages, start=0):
    size = node.host_pool.page_size
    return torch.arange(start * size, (start + pages) * size)


def transfer(kit, name, keys, host_indices):
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    return PoolTransfer(name=name, keys=keys, host_indices=host_indices)


def test_zero_keys_give_empty_answers(node):
    storage, none = node.storage, indices(node, 0)
    assert storage.batch_exists([]) == 0
    assert storage.batch_get_v1([], none) == []
    assert storage.batch_set_v1([], none) == []
    assert storage.batch_get([], []) == []
    assert storage.batch_set([], []) is True
    assert storage.batch_exists_v2([], []).kv_hit_pages == 0
    assert storage.batch_get_v2([]) == {} == storage.batch_set_v2([])


@pytest.mark.parametrize("pages", [1, 2, 127, 128, 129, 3000])
def test_one_answer_per_key_for_any_number_of_keys(node, pages):
    keys = [f"{i:064x}" for i in range(pages)]
    fits = min(pages, node.host_pool.page_num)
    assert node.storage.batch_exists(keys) == 0
    assert node.storage.batch_set_v1(keys[:fits], indices(node, fits)) == [True] * fits
    assert node.storage.batch_exists(keys) == fits
    assert node.storage.batch_get_v1(keys[:fits], indices(node, fits)) == [True] * fits


def test_a_missing_page_is_false_at_its_place_only(node):
    assert node.storage.batch_set_v1(KEYS[:2] + KEYS[3:], indices(node, 4)) == [True] * 4
    assert node.storage.batch_get_v1(KEYS, indices(node, 5, 5)) == [True, True, False, True, True]
    assert node.storage.batch_exists(KEYS) == 2


@pytest.mark.parametrize(
    "bad", [None, torch.arange(7), torch.arange(80) + 1, torch.arange(80).flip(0), torch.arange(80) + 10**9]
)
def test_host_indices_that_make_no_sense_are_refused_not_followed(node, bad):
    assert node.storage.batch_set_v1(KEYS, bad) == [False] * 5
    assert node.storage.batch_get_v1(KEYS, bad) == [False] * 5
    assert node.storage.batch_exists(KEYS) == 0
    assert node.storage.metrics.snapshot().counters["adapter_errors"] == 2


def test_the_generic_path_round_trips_and_shares_nothing_with_zero_copy(node):
    storage, pool = node.storage, node.host_pool
    pages = [pool.get_dummy_flat_data_page() for _ in KEYS]
    for number, page in enumerate(pages):
        page.view(torch.uint8).fill_(number + 1)
    assert storage.batch_set(KEYS, pages) is True
    targets = [torch.zeros_like(p) for p in pages]
    got = storage.batch_get(KEYS, targets)
    assert all(torch.equal(g.view(torch.uint8), p.view(torch.uint8)) for g, p in zip(got, pages, strict=True))
    assert storage.exists(KEYS[0]) is True
    assert storage.exists("f" * 64) is False
    assert storage.get("f" * 64, targets[0]) is None
    assert storage.batch_exists(KEYS) == 0  # zero-copy pages order their bytes otherwise


def test_every_call_after_close_is_a_miss(kit, node):
    storage = node.storage
    storage.batch_set_v1(KEYS, indices(node, 5))
    storage.close()
    storage.close()
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS, indices(node, 5)) == [False] * 5
    assert storage.batch_set_v1(KEYS, indices(node, 5)) == [False] * 5
    assert storage.batch_get(KEYS, [node.host_pool.get_dummy_flat_data_page() for _ in KEYS]) == [None] * 5
    assert storage.batch_set(KEYS, [node.host_pool.get_dummy_flat_data_page() for _ in KEYS]) is False
    assert storage.exists(KEYS[0]) is False
    assert storage.clear() is False
    asked = transfer(kit, "kv", KEYS, indices(node, 5))
    assert storage.batch_get_v2([asked]) == {"kv": [False] * 5}
    assert storage.batch_set_v2([asked]) == {"kv": [False] * 5}
    result = storage.batch_exists_v2(KEYS, [asked])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {})


def test_a_pool_that_was_never_registered_gets_a_full_list_of_misses(kit, node):
    asked = transfer(kit, "indexer", KEYS, indices(node, 5))
    assert node.storage.batch_get_v2([asked]) == {"indexer": [False] * 5}
    assert node.storage.batch_exists_v2(KEYS, [asked]).kv_hit_pages == 0


def test_a_transfer_without_keys_gets_an_empty_list(kit, node):
    assert node.storage.batch_get_v2([transfer(kit, "kv", None, None)]) == {"kv": []}


def test_statistics_are_none_or_storage_metrics_and_count_what_moved(node):
    from sglang.srt.observability.metrics_collector import StorageMetrics

    assert node.storage.get_stats() is None
    node.storage.batch_set_v1(KEYS, indices(node, 5))
    node.storage.batch_get_v1(KEYS, indices(node, 5))
    stats = node.storage.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([5], [5])
    assert stats.backup_bandwidth[0] > 0 < stats.prefetch_bandwidth[0]
    assert node.storage.get_stats() is None


def test_clear_forgets_this_deployment_only(kit, node, nvme):
    node.storage.batch_set_v1(KEYS, indices(node, 5))
    other = kit.Node(kit.Shape("mha", "layer_first", 16), "nvme", nvme)
    other.storage.batch_set_v1(KEYS, indices(other, 5))
    assert node.storage.clear() is True
    assert node.storage.batch_exists(KEYS) == 0
    assert other.storage.batch_exists(KEYS) == 5
    other.close()


def test_a_bug_of_ours_switches_the_extension_off_and_serving_goes_on(node, monkeypatch):
    from sglang_hicache_ext.errors import InvariantError

    def broken(*_, **__):
        raise InvariantError("illegal transition")

    monkeypatch.setattr(node.storage.store, "hit_pages", broken)
    assert node.storage.batch_exists(KEYS) == 0
    monkeypatch.undo()
    node.storage.batch_set_v1(KEYS, indices(node, 5))
    assert node.storage.batch_exists(KEYS) == 0
    assert "illegal transition" in node.storage.describe()["disabled"]
