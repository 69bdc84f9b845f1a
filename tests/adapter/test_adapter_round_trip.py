"""What one SGLang controller writes behind, a fresh one prefetches: byte for byte, in every layout."""

import pytest

CASES = [
    ("mha", "page_first", 16),
    ("mha", "page_first_direct", 64),
    ("mha", "layer_first", 16),
    ("mha", "page_first", 1),
    ("asymmetric", "page_first", 16),
    ("asymmetric", "page_first_direct", 64),
    ("mla", "page_first", 64),
    ("mla", "page_first_direct", 16),
    ("mla", "layer_first", 16),
    ("dsa", "page_first", 64),
    ("dsa", "page_first_direct", 64),
    ("dsa", "layer_first", 64),
]


@pytest.mark.parametrize(("pool", "layout", "page_tokens"), CASES)
def test_a_fresh_node_finds_the_same_bytes(kit, nvme, pool, layout, page_tokens):
    shape = kit.Shape(pool, layout, page_tokens)
    tokens = list(range(1, shape.tokens + 1))
    writer = kit.Node(shape, "nvme", nvme)
    writer.produce(tokens, seed=7)
    writer.close()

    reader = kit.Node(shape, "nvme", nvme)
    assert reader.prefetch(tokens) == len(tokens)
    assert reader.differing_buffers(tokens, seed=7) == []
    reader.close()


def test_sglangs_dynamic_backend_reaches_the_same_pages(kit, nvme):
    shape = kit.Shape("mha", "page_first", 16)
    tokens = list(range(1, shape.tokens + 1))
    module = "sglang_hicache_ext.sglang_adapter.storage"
    named = {"backend_name": "nvme", "module_path": module, "class_name": "HiCacheExtStorage", "interface_v1": 1}
    writer = kit.Node(shape, "dynamic", {**nvme, **named})
    assert writer.controller.page_get_func.__name__ == "_page_get_zero_copy"
    writer.produce(tokens, seed=8)
    writer.close()
    reader = kit.Node(shape, "nvme", nvme)
    assert reader.prefetch(tokens) == len(tokens)
    assert reader.differing_buffers(tokens, seed=8) == []
    reader.close()
