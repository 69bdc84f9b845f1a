"""Device pools as the linker sees them, and every path that brings bytes there."""

import time

import numpy as np
import pytest
import torch
from linker_kit import (
    PAGE,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    fill,
    fingerprint,
    flip,
    keys_of,
    open_store,
    slots_of,
    tensors,
)

from sglang_hicache_ext.errors import CapabilityError, ConfigError
from sglang_hicache_ext.sglang_adapter.linker_offload import copy_out
from sglang_hicache_ext.sglang_adapter.linker_paths import BouncePath, DirectPath, neighbours
from sglang_hicache_ext.sglang_adapter.linker_pools import align_host_pool, device_pools
from sglang_hicache_ext.sglang_adapter.linker_quarantine import quarantine_of
from sglang_hicache_ext.sglang_adapter.linker_sums import layer_sums, run_sums
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LOADED, LayeredPages


def view(pool, components=("full",)):
    align_host_pool(pool)
    return device_pools(pool, PAGE, set(components))


def soon():
    return time.monotonic() + 20


class Stored:
    """Random pages of a pool in a store, and a second pool to load them into."""

    def __init__(self, path, make, pages=(2, 3, 4, 9), sums=False, **more):
        self.source, self.target = make(), make()
        fill(self.source)
        pool, self.pool = view(self.source).by_name["kv"], view(self.target).by_name["kv"]
        self.store = open_store(path, **more)
        self.layered, self.ns = LayeredPages(self.store, pool.geometry), self.store.namespace(fingerprint())
        self.keys = keys_of(len(pages))
        rows = pool.rows(slots_of(pages), len(pages))
        memory = torch.zeros((len(pages), pool.geometry.page_bytes), dtype=torch.uint8)
        copy_out(pool, rows, memory)
        result = self.layered.write(self.ns, self.keys, memory.numpy(), layer_sums(pool, rows) if sums else None)
        assert all(o.is_stored for o in result.outcomes)
        self.from_pages, self.memory = list(pages), memory

    def load(self, path, pages):
        rows = self.pool.rows(slots_of(pages), len(pages))
        read = self.layered.open(self.ns, self.keys, soon(), path.lanes)
        assert read.is_loaded
        return [path.read_layer(read, self.pool, layer, rows, soon()) for layer in range(self.pool.geometry.layers)]

    def assert_same(self, pages):
        for a, b in zip(tensors(self.source), tensors(self.target), strict=True):
            for src, dst in zip(self.from_pages, pages, strict=True):
                x, y = a[src * PAGE : (src + 1) * PAGE], b[dst * PAGE : (dst + 1) * PAGE]
                assert torch.equal(x.view(torch.int16), y.view(torch.int16))
            rest = torch.ones(len(b), dtype=torch.bool)
            rest[slots_of(pages)] = False
            assert not b[rest].any(), "bytes outside the pages were written"


@pytest.mark.parametrize("make", [MHATokenToKVPool, MLATokenToKVPool])
@pytest.mark.parametrize("kind", ["direct", "bounce"])
@pytest.mark.parametrize("pages", [(5, 6, 7, 8), (11, 3, 20, 4)])
def test_every_layer_lands_in_its_slots_and_nowhere_else(tmp_path, make, kind, pages):
    stored = Stored(tmp_path / "store", make)
    path = DirectPath() if kind == "direct" else BouncePath([stored.pool], slots=2)
    assert all(r.is_loaded and r.drain is None for r in stored.load(path, pages))
    stored.assert_same(pages)
    path.close()
    stored.store.close()


def test_the_bounce_ring_is_smaller_than_a_layer_and_still_enough(tmp_path):
    stored = Stored(tmp_path / "store", MHATokenToKVPool)
    path = BouncePath([stored.pool], slots=2)
    path._slot_bytes = stored.pool.geometry.layer_bytes(0)  # one page a wave
    assert all(r.is_loaded for r in stored.load(path, (1, 2, 3, 4)))
    stored.assert_same((1, 2, 3, 4))
    assert path._free.qsize() == 2
    stored.store.close()


@pytest.mark.parametrize("kind", ["direct", "bounce"])
def test_a_flipped_byte_never_counts_as_loaded(tmp_path, kind):
    stored = Stored(tmp_path / "store", MHATokenToKVPool)
    geometry = stored.pool.geometry
    needle = stored.memory[1, geometry.offset(1) :][:64].numpy().tobytes()
    assert flip(tmp_path / "store", needle, at=9)
    path = DirectPath() if kind == "direct" else BouncePath([stored.pool], slots=2)
    results = stored.load(path, (5, 6, 7, 8))
    assert [r.is_loaded for r in results] == [True, False, True]
    assert results[1].codes[1] != LOADED
    stored.store.close()


def test_host_pools_are_moved_to_aligned_memory_and_stay_the_same_tensors():
    pool = MHATokenToKVPool()
    fill(pool)
    before, objects = [t.clone() for t in tensors(pool)], list(map(id, tensors(pool)))
    align_host_pool(pool)
    assert all(t.data_ptr() % 4096 == 0 for t in tensors(pool))
    assert list(map(id, tensors(pool))) == objects
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(pool), strict=True))


def test_a_sliding_window_model_has_two_pools_and_one_step_per_layer():
    pools = view(SWAKVPool(), ("full", "swa"))
    assert set(pools.by_name) == {"kv", "swa"}
    assert pools.steps == (("kv", 0), ("swa", 0), ("kv", 1), ("swa", 1))


@pytest.mark.parametrize(
    ("pool", "components", "name"),
    [
        (MHATokenToKVPool(), ("full", "mamba"), "mamba"),
        (type("DSATokenToKVPool", (), {})(), ("full",), "DSATokenToKVPool"),
        (type("MHATokenToKVPoolFP4", (), {})(), ("full",), "MHATokenToKVPoolFP4"),
        (MHATokenToKVPool(), ("full", "swa"), "MHATokenToKVPool"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(pool, components, name):
    with pytest.raises(CapabilityError) as raised:
        device_pools(pool, PAGE, set(components))
    assert name in str(raised.value)


def test_pages_that_do_not_fill_blocks_are_refused_with_the_remedy():
    with pytest.raises(ConfigError) as raised:
        device_pools(MHATokenToKVPool(), 16, {"full"})
    assert "--page-size" in str(raised.value)


@pytest.mark.parametrize(
    "slots", [slots_of([1])[:-1], slots_of([1]).flip(0), slots_of([24]), slots_of([-1]), slots_of([1, 2])]
)
def test_slots_that_are_no_whole_pages_of_the_pool_are_refused(slots):
    pool = view(MHATokenToKVPool()).by_name["kv"]
    with pytest.raises(ValueError, match="pool kv"):
        pool.rows(slots, 1)


def test_neighbours_are_found_in_any_order_of_pages():
    rows = np.asarray([5, 6, 7, 1, 9, 10]) * PAGE
    assert neighbours(rows, PAGE) == [(0, 3), (3, 1), (4, 2)]
    assert neighbours(rows[:0], PAGE) == []


def test_sums_see_every_flipped_bit_and_swapped_word():
    source = MHATokenToKVPool(layers=1)
    fill(source)
    pool = view(source).by_name["kv"]
    rows = pool.rows(slots_of([3, 4]), 2)
    before = run_sums(pool, 0, rows)
    rng = np.random.default_rng(0)
    for part in (0, 1):
        data = pool.buffers[0][part][rows[0] : rows[0] + PAGE].view(-1)
        for bit in rng.integers(0, len(data) * 8, 200).tolist():
            data[bit // 8] ^= 1 << (bit % 8)
            after = run_sums(pool, 0, rows)
            assert (after[0] != before[0]).all() and (after[1] == before[1]).all()
            data[bit // 8] ^= 1 << (bit % 8)
    words = pool.buffers[0][0][rows[0] : rows[0] + PAGE].view(-1).view(torch.int64)
    words[[0, 1]] = words[[1, 0]]
    assert (run_sums(pool, 0, rows)[0] != before[0]).all()


class PagedAllocator:
    """The part of SGLang's paged allocator that the quarantine stands in front of."""

    def __init__(self, pages=10):
        self.page_size, self.device, self.pages = PAGE, "cpu", pages
        self.clear()

    def clear(self):
        self.free_pages = torch.arange(1, self.pages + 1)

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def _release_page_ids(self, *page_ids):
        self.free_pages = torch.cat((*page_ids, self.free_pages))

    def take(self, count):
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken


class Held:
    done = False

    def is_done(self):
        return self.done

    def wait(self, timeout_s):
        return self.done


def test_withheld_pages_are_not_handed_out_until_their_read_has_ended():
    allocator, drain = PagedAllocator(), Held()
    taken = allocator.take(4)  # pages 1 to 4
    quarantine = quarantine_of(allocator)
    assert quarantine_of(allocator) is quarantine
    quarantine.hold(np.asarray([2, 3]), drain)
    allocator._release_page_ids(taken)
    assert not set(allocator.free_pages.tolist()) & {2, 3}
    assert allocator.available_size() == 10 * PAGE  # SGLang's leak check still adds up
    allocator.clear()
    assert not set(allocator.free_pages.tolist()) & {2, 3}
    drain.done = True
    assert allocator.available_size() == 10 * PAGE
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 11))
