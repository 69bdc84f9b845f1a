"""NvmeLinker as SGLang calls it, with SGLang's own pools, allocator and transfers, in this process."""

import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from linker_kit import flip

KIT = Path(__file__).resolve().parent.parent / "sglang_cpu"
PAGE, LAYERS, LIMIT_S = 64, 3, 30.0

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::sglang"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def sgl():
    """SGLang's classes; skips where it is not installed."""
    pytest.importorskip("sglang")
    for folder in (KIT, KIT / "site"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cpu_kit

        cpu_kit.install()
        import controller_kit

        controller_kit.start()
        from sglang.srt.mem_cache import allocator, hicache_storage, memory_pool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        from sglang_hicache_ext.sglang_adapter.linker import NvmeLinker
    return SimpleNamespace(
        PagedTokenToKVPoolAllocator=allocator.PagedTokenToKVPoolAllocator,
        PoolName=hicache_storage.PoolName,
        PoolTransfer=hicache_storage.PoolTransfer,
        MHATokenToKVPool=memory_pool.MHATokenToKVPool,
        MLATokenToKVPool=memory_pool.MLATokenToKVPool,
        ComponentType=ComponentType,
        NvmeLinker=NvmeLinker,
    )


@pytest.fixture
def make(sgl, tmp_path):
    made = []

    def build(mla=False, pages=40, components=None, page=PAGE, **extra):
        common = {
            "size": page * pages,
            "page_size": page,
            "dtype": torch.bfloat16,
            "layer_num": LAYERS,
            "device": "cpu",
        }
        if mla:
            pool = sgl.MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=32, enable_memory_saver=False, **common)
        else:
            pool = sgl.MHATokenToKVPool(head_num=2, head_dim=32, enable_memory_saver=False, **common)
        allocator = sgl.PagedTokenToKVPoolAllocator(
            size=page * pages, page_size=page, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
        )
        params = SimpleNamespace(
            token_to_kv_pool_allocator=allocator, page_size=page, tp_cache_group=None, attn_tp_cache_group=None,
            pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_eagle=False,
            mtp_draft_device_pools=(), sidecar_draft_device_pools=(), mtp_draft_mamba_pools=(),
        )  # fmt: skip
        linker = sgl.NvmeLinker(
            SimpleNamespace(speculative_algorithm=None, served_model_name="m"),
            params,
            components=components or {sgl.ComponentType.FULL},
            extra_config={"path": str(tmp_path / "store"), "capacity": "96MiB", **extra},
            forward_stream=None,
        )
        pool.register_layer_transfer_counter(linker.layer_done_counter)
        made.append(linker)
        return linker, pool, allocator

    yield build
    for linker in made:
        linker.close()


def buffers(pool):
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)


def hexes(count, start=0):
    return [f"{start + i:064x}" for i in range(count)]


def kv(sgl, keys, slots=None):
    return [sgl.PoolTransfer(name=sgl.PoolName.KV, keys=keys, device_indices=slots)]


def computed(pool, allocator, pages, seed=0):
    """Slots of ``pages`` pages that hold random KV."""
    slots = allocator.alloc(pages * PAGE)
    generator = torch.Generator().manual_seed(seed)
    for tensor in buffers(pool):
        made = torch.randn((len(slots), *tensor.shape[1:]), generator=generator)
        tensor[slots] = made.to(tensor.dtype)
    return slots


def until(condition, what):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        threading.Event().wait(0.002)


def offload(sgl, linker, keys, slots):
    before = linker.num_completed_offloads()
    assert linker.offload(kv(sgl, keys, slots)) is True
    until(lambda: linker.num_completed_offloads() > before, "offload")
    return linker.pop_completed_offload()


def load(sgl, linker, keys, slots, rid="r"):
    assert linker.load(rid, kv(sgl, keys, slots)) is True
    index = linker.start_layer_wise_loading()
    assert index >= 0
    linker.layer_done_counter.set_consumer(index)
    return index


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("path", ["auto", "bounce"])
def test_what_one_linker_offloaded_another_loads_layer_by_layer(sgl, make, mla, path):
    linker, pool, allocator = make(mla)
    slots = computed(pool, allocator, 6)
    keys = hexes(6)
    assert linker.lookup("a", kv(sgl, keys)) == []
    assert offload(sgl, linker, keys, slots) is True
    linker.close()
    again, other, free = make(mla, linker_path=path)
    assert again.describe()["path"] == ("direct" if path == "auto" else "bounce")
    assert again.lookup("b", kv(sgl, [*keys, "f" * 64])) == [1, 2, 3, 4, 5, 6]
    free.alloc(3 * PAGE)
    target = free.alloc(6 * PAGE)
    index = load(sgl, again, keys, target)
    for layer in range(LAYERS):
        again.layer_done_counter.wait_until(layer)
        for mine, theirs in zip(buffers(other)[layer::LAYERS], buffers(pool)[layer::LAYERS], strict=True):
            assert torch.equal(mine[target].view(torch.int16), theirs[slots].view(torch.int16))
    assert again.finish_layer_wise_loading(index) is True
    assert again.describe()["read_outcomes"] == {"loaded": 6}


def test_several_requests_share_one_batch_also_with_the_same_prefix(sgl, make):
    linker, pool, allocator = make()
    slots, keys = computed(pool, allocator, 6), hexes(6)
    offload(sgl, linker, keys, slots)
    first, second = allocator.alloc(6 * PAGE), allocator.alloc(4 * PAGE)
    linker.load("a", kv(sgl, keys, first))
    index = load(sgl, linker, keys[:4], second, "b")
    assert linker.finish_layer_wise_loading(index) is True
    for tensor in buffers(pool):
        assert torch.equal(tensor[first].view(torch.int16), tensor[slots].view(torch.int16))
        assert torch.equal(tensor[second].view(torch.int16), tensor[slots[: 4 * PAGE]].view(torch.int16))


def test_a_flipped_byte_fails_the_load_and_is_a_miss_afterwards(sgl, make, tmp_path):
    linker, pool, allocator = make()
    slots, keys = computed(pool, allocator, 6), hexes(6)
    offload(sgl, linker, keys, slots)
    needle = pool.v_buffer[1][slots[2 * PAGE : 3 * PAGE]].view(torch.uint8).numpy().tobytes()[:64]
    assert flip(tmp_path / "store", needle, at=11)
    index = load(sgl, linker, keys, allocator.alloc(6 * PAGE))
    linker.layer_done_counter.wait_until(LAYERS - 1)  # a failed load never leaves the forward waiting
    assert linker.finish_layer_wise_loading(index) is False
    assert linker.describe()["read_outcomes"]["corrupt"] == 1
    assert linker.lookup("c", kv(sgl, keys)) == [1, 2]
    assert offload(sgl, linker, keys, slots) is True  # the hole heals
    assert linker.lookup("c", kv(sgl, keys)) == [1, 2, 3, 4, 5, 6]


def test_pages_that_went_away_after_the_lookup_fail_the_load_before_a_byte_is_written(sgl, make):
    linker, pool, allocator = make()
    slots, keys = computed(pool, allocator, 4), hexes(4)
    offload(sgl, linker, keys, slots)
    linker._store.clear()
    target = allocator.alloc(4 * PAGE)
    before = [tensor[target].clone() for tensor in buffers(pool)]
    assert linker.finish_layer_wise_loading(load(sgl, linker, keys, target)) is False
    assert all(torch.equal(a, t[target]) for a, t in zip(before, buffers(pool), strict=True))


def test_a_queued_load_can_be_cancelled_and_then_nothing_starts(sgl, make):
    linker, pool, allocator = make()
    slots, keys = computed(pool, allocator, 2), hexes(2)
    offload(sgl, linker, keys, slots)
    assert linker.load("r", kv(sgl, keys, allocator.alloc(2 * PAGE)))
    assert linker.cancel_queued_load("r") is True
    assert linker.cancel_queued_load("r") is False
    assert linker.start_layer_wise_loading() == -1
    assert linker.finish_layer_wise_loading(-1) is True


def test_a_full_queue_declines_at_once_and_takes_the_node_later(sgl, make):
    linker, pool, allocator = make(linker_queue_pages=4)
    held = linker._offloads._copying
    held.acquire()
    try:
        slots, keys = computed(pool, allocator, 8), hexes(8)
        assert linker.offload(kv(sgl, keys[:4], slots[: 4 * PAGE])) is True
        started = time.monotonic()
        assert linker.offload(kv(sgl, keys[4:], slots[4 * PAGE :])) is False
        assert time.monotonic() - started < 1.0
        assert linker.num_completed_offloads() == 0
    finally:
        held.release()
    until(lambda: linker.num_completed_offloads() == 1, "first offload")
    assert linker.pop_completed_offload() is True
    assert offload(sgl, linker, keys[4:], slots[4 * PAGE :]) is True
    assert linker.describe()["queued_offload_pages"] == 0


def test_with_several_ranks_a_full_queue_answers_with_a_failed_offload_in_its_place(sgl, make):
    linker, pool, allocator = make(linker_queue_pages=1)
    linker._ranks = 2
    held = linker._offloads._copying
    held.acquire()
    try:
        slots, keys = computed(pool, allocator, 2), hexes(2)
        assert linker.offload(kv(sgl, keys[:1], slots[:PAGE])) is True
        assert linker.offload(kv(sgl, keys[1:], slots[PAGE:])) is True
        assert linker.num_completed_offloads() == 0  # in order: the second waits for the first
    finally:
        held.release()
    until(lambda: linker.num_completed_offloads() == 2, "both")
    assert [linker.pop_completed_offload(), linker.pop_completed_offload()] == [True, False]


def test_after_a_reset_no_offload_reads_a_slot_and_stored_pages_stay(sgl, make):
    linker, pool, allocator = make()
    slots, keys = computed(pool, allocator, 4), hexes(4)
    offload(sgl, linker, keys[:2], slots[: 2 * PAGE])
    held = linker._offloads._copying
    held.acquire()
    linker.offload(kv(sgl, keys[2:], slots[2 * PAGE :]))
    resetting = threading.Thread(target=linker.reset)
    resetting.start()
    until(lambda: not linker._offloads._jobs, "reset began")
    held.release()
    resetting.join(LIMIT_S)
    assert not resetting.is_alive()
    for tensor in buffers(pool):
        tensor.zero_()  # SGLang hands the slots to others
    assert linker.num_completed_offloads() == 0
    assert offload(sgl, linker, hexes(1, 50), slots[:PAGE]) is True  # the thread has passed the cancelled job
    assert linker.lookup("r", kv(sgl, keys)) == [1, 2]


def test_another_weight_epoch_sees_no_page_of_the_old_one(sgl, make, monkeypatch):
    from sglang_hicache_ext.sglang_adapter import linker as module
    from sglang_hicache_ext.sglang_adapter.epoch import WeightEpoch

    epoch = WeightEpoch()
    monkeypatch.setattr(module, "CURRENT", epoch)
    linker, pool, allocator = make()
    slots, keys = computed(pool, allocator, 2), hexes(2)
    offload(sgl, linker, keys, slots)
    assert linker.lookup("r", kv(sgl, keys)) == [1, 2]
    epoch.begin_update("token", 0)
    assert linker.lookup("r", kv(sgl, keys)) == []
    epoch.flushed(0)
    assert linker.lookup("r", kv(sgl, keys)) == []


def test_a_rank_that_does_not_own_replicated_pages_agrees_without_writing(sgl, make):
    linker, pool, allocator = make(mla=True)
    from dataclasses import replace

    linker._deployment = replace(linker._deployment, is_writer=False)
    slots, keys = computed(pool, allocator, 2), hexes(2)
    assert offload(sgl, linker, keys, slots) is True
    assert linker.lookup("r", kv(sgl, keys)) == []


def test_nothing_is_raised_into_sglang_when_the_store_is_gone(sgl, make):
    linker, pool, allocator = make()
    slots, keys = computed(pool, allocator, 2), hexes(2)
    offload(sgl, linker, keys, slots)
    linker._store.close()
    assert linker.lookup("r", kv(sgl, keys)) == []
    index = load(sgl, linker, keys, allocator.alloc(2 * PAGE))
    assert linker.finish_layer_wise_loading(index) is False
    assert linker.offload(kv(sgl, keys, slots)) in (True, False)
    linker.reset()


def test_what_the_linker_does_not_support_is_refused_at_start(sgl, make):
    from sglang_hicache_ext.errors import CapabilityError, ConfigError

    with pytest.raises(CapabilityError, match="mamba"):
        make(components={sgl.ComponentType.FULL, sgl.ComponentType.MAMBA})
    with pytest.raises(ConfigError, match="page-size"):
        make(page=16)
    with pytest.raises(CapabilityError, match="cpu memory"):
        make(linker_path="gds")
    with pytest.raises(ConfigError, match="capacity"):
        make(capcity="1GiB")
