"""Attach, detach, clear and close while work is going on; pages in the device's hands; refusals at start."""

import gc
import json
import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

KEYS = [f"{i:064x}" for i in range(8)]


@pytest.fixture
def node(kit, nvme):
    made = kit.Node(kit.Shape("mha", "page_first", 16), "nvme", nvme)
    yield made
    made.close()


def indices(node, pages, start=0):
    size = node.host_pool.page_size
    return torch.arange(start * size, (start + pages) * size)


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_a_hundred_attachments_leave_threads_and_descriptors_as_they_were(node):
    from sglang_hicache_ext.sglang_adapter.storage import HiCacheExtStorage

    config = node.controller.storage_config

    def once():
        storage = HiCacheExtStorage(config, {})
        storage.register_mem_pool_host(node.host_pool)
        storage.register_mem_host_pool_v2(node.host_pool, "kv")
        storage.on_host_pools_registered()
        assert storage.batch_set_v1(KEYS, indices(node, 8)) == [True] * 8
        assert storage.batch_get_v1(KEYS, indices(node, 8, 8)) == [True] * 8
        storage.close()

    for _ in range(3):
        once()
    gc.collect()
    threads, descriptors = threading.active_count(), open_descriptors()
    for _ in range(100):
        once()
    gc.collect()
    assert threading.active_count() <= threads
    assert open_descriptors() <= descriptors + 1


def test_sglang_detaches_and_attaches_by_name_and_pages_are_still_there(kit, node):
    tokens = list(range(1, node.shape.tokens + 1))
    node.produce(tokens, seed=3)
    assert node.controller.storage_backend_type == "nvme"
    ok, message = node.tree.detach_storage_backend()
    assert ok, message
    ok, message = node.attach()
    assert ok, message
    assert node.controller.page_get_func.__name__ == "_page_get_zero_copy"
    node.tree.reset()
    assert node.prefetch(tokens) == len(tokens)
    assert node.differing_buffers(tokens, seed=3) == []


def test_a_refused_attachment_says_why_and_leaves_nothing_running(node):
    before = threading.active_count()
    node.tree.detach_storage_backend()
    ok, message = node.tree.attach_storage_backend(
        storage_backend="nvme", storage_backend_extra_config_json=json.dumps({**node.extra, "capasity": "1GiB"})
    )
    assert not ok
    assert "did you mean 'capacity'" in message
    assert not node.controller.enable_storage
    assert threading.active_count() < before
    assert node.attach()[0]


def test_a_side_pool_that_cannot_be_reached_is_refused_and_rolled_back(kit, node, monkeypatch):
    from sglang_hicache_ext.errors import CapabilityError
    from sglang_hicache_ext.sglang_adapter.storage import HiCacheExtStorage

    def refuse(*_):
        raise CapabilityError("host pool 'odd' gives no page addresses")

    node.tree.detach_storage_backend()
    monkeypatch.setattr(HiCacheExtStorage, "register_mem_host_pool_v2", refuse)
    ok, message = node.attach()
    assert not ok
    assert "no page addresses" in message
    assert not node.controller.enable_storage
    monkeypatch.undo()
    assert node.attach()[0]


def test_clear_and_close_during_reads_and_writes_only_make_misses(node):
    storage, stop, errors = node.storage, threading.Event(), []
    answers = []

    def work(method, start):
        try:
            while not stop.is_set():
                answers.append(method(KEYS, indices(node, 8, start)))
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(storage.batch_set_v1, 0)),
        threading.Thread(target=work, args=(storage.batch_get_v1, 8)),
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert storage.clear() is True
    storage.close()
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert errors == []
    assert all(len(a) == 8 for a in answers)


class HangingDrain:
    """I/O that is over when the test says so."""

    def __init__(self):
        self.event = threading.Event()

    def is_done(self):
        return self.event.is_set()

    def wait(self, timeout_s):
        return self.event.wait(timeout_s)


def late_read(drain, positions):
    from sglang_hicache_ext.outcome import Outcome
    from sglang_hicache_ext.ports import ReadResult

    def read(ns, keys, regions, deadline_s=None):
        outcomes = tuple(Outcome.LATE if i in positions else Outcome.LOADED for i in range(len(keys)))
        return ReadResult(outcomes, tuple(positions), drain)

    return read


def test_a_page_the_device_may_still_write_to_is_not_handed_out_again(node, monkeypatch):
    pool, drain = node.host_pool, HangingDrain()
    total = pool.available_size()
    monkeypatch.setattr(node.storage.store, "read", late_read(drain, [1, 3]))
    slots = pool.alloc(4 * pool.page_size)
    assert node.storage.batch_get_v1(KEYS[:4], slots) == [True, False, True, False]
    assert node.storage.describe()["draining_pages"] == 2
    held = set(slots[pool.page_size : 2 * pool.page_size].tolist()) | set(slots[3 * pool.page_size :].tolist())

    assert pool.free(slots) == len(slots)
    assert pool.available_size() == total - 2 * pool.page_size
    everything = pool.alloc(pool.available_size() // pool.page_size * pool.page_size)
    assert not held & set(everything.tolist())
    assert pool.alloc(pool.page_size) is None
    drain.event.set()
    again = pool.alloc(2 * pool.page_size)
    assert set(again.tolist()) == held
    pool.free(everything)
    pool.free(again)
    assert pool.available_size() == total
    assert node.storage.describe()["draining_pages"] == 0


def test_a_flush_of_the_pool_keeps_draining_pages_out(node, monkeypatch):
    pool, drain = node.host_pool, HangingDrain()
    monkeypatch.setattr(node.storage.store, "read", late_read(drain, [0]))
    slots = pool.alloc(pool.page_size)
    node.storage.batch_get_v1(KEYS[:1], slots)
    pool.clear()
    everything = pool.alloc(pool.available_size())
    assert not set(slots.tolist()) & set(everything.tolist())
    drain.event.set()
    assert set(pool.alloc(pool.page_size).tolist()) == set(slots.tolist())
    pool.clear()
    assert pool.available_size() == pool.size


def test_a_failed_write_counts_as_stored_once_its_bytes_are_kept(node, monkeypatch):
    from sglang_hicache_ext.outcome import WriteOutcome
    from sglang_hicache_ext.ports import WriteResult

    real, failed = node.storage.store.write, threading.Event()

    def write(ns, keys, regions, deadline_s=None):
        if failed.is_set():
            return real(ns, keys, regions, deadline_s)
        failed.set()
        return WriteResult((WriteOutcome.STORED, WriteOutcome.WRITE_ERROR)[: len(keys)])

    monkeypatch.setattr(node.storage.store, "write", write)
    pool = node.host_pool
    page = pool.get_dummy_flat_data_page()
    page.view(torch.uint8).fill_(77)
    pool.set_from_flat_data_page(pool.page_size, page)
    assert node.storage.batch_set_v1(KEYS[:2], indices(node, 2)) == [True, True]
    pool.set_from_flat_data_page(pool.page_size, torch.zeros_like(page))
    assert_eventually(lambda: node.storage.batch_exists(KEYS[1:2]) == 1)
    assert node.storage.batch_get_v1(KEYS[1:2], indices(node, 1, 5)) == [True]
    assert torch.equal(pool.get_data_page(5 * pool.page_size).view(torch.uint8), page.view(torch.uint8))


def assert_eventually(condition, limit_s=20):
    done = threading.Event()
    for _ in range(limit_s * 50):
        if condition():
            return
        done.wait(0.02)
    raise AssertionError("it never came true")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"interface_v1": None}, '"interface_v1": 1'),
        ({"backend_name": "nvmee"}, "'nvme'"),
        ({"capacity": "lots"}, "64GiB"),
        ({"engine": "fast"}, "'io_uring'"),
        ({"path": []}, "directory"),
        ({"durabilty": "device"}, "'durability'"),
        ({"path": "FILE"}, "directory"),
    ],
)
def test_bad_input_is_refused_in_one_message_that_says_what_to_write(kit, node, nvme, tmp_path, change, words):
    from sglang_hicache_ext.errors import ConfigError
    from sglang_hicache_ext.sglang_adapter.storage import HiCacheExtStorage

    (tmp_path / "file").write_text("x")
    extra = {**nvme, "interface_v1": 1, "backend_name": "nvme", **change}
    extra = {k: (str(tmp_path / "file") if v == "FILE" else v) for k, v in extra.items() if v is not None}
    config = type(node.controller.storage_config)(**{**vars(node.controller.storage_config), "extra_config": extra})
    with pytest.raises(ConfigError) as refused:
        HiCacheExtStorage(config, {})
    assert words in str(refused.value)


def test_decode_context_parallelism_and_split_heads_are_refused(node):
    from types import SimpleNamespace

    from sglang_hicache_ext.errors import ConfigError
    from sglang_hicache_ext.sglang_adapter.identity import deployment_of

    base = vars(node.controller.storage_config)
    for change, words in (({"dcp_size": 2}, "--dcp-size 1"), ({"should_split_heads": True}, "tp_lcm_size")):
        with pytest.raises(ConfigError, match=words):
            deployment_of(SimpleNamespace(**{**base, **change}), "")


def test_addresses_are_those_the_pool_itself_gives(kit, nvme):
    from sglang_hicache_ext.sglang_adapter.host_pool import ZeroCopyPages, page_slots

    for pool_kind, layout in (("mha", "layer_first"), ("asymmetric", "page_first"), ("mla", "layer_first")):
        made = kit.Node(kit.Shape(pool_kind, layout, 16), "nvme", nvme)
        pages = ZeroCopyPages(made.host_pool)
        assert pages.is_linear
        chosen = indices(made, 3, 2).reshape(3, -1).flip(0).reshape(-1)
        regions = pages.for_write(page_slots(chosen, 3, 16))
        ptrs, sizes = made.host_pool.get_page_buffer_meta(chosen)
        assert regions.addrs.reshape(-1).tolist() == ptrs
        assert np.tile(regions.sizes, 3).tolist() == list(sizes)
        made.close()


def test_a_write_call_that_fails_as_a_whole_leaves_no_hole(node, monkeypatch):
    from sglang_hicache_ext.errors import StoreError

    real, failed = node.storage.store.write, threading.Event()

    def write(ns, keys, regions, deadline_s=None):
        if failed.is_set():
            return real(ns, keys, regions, deadline_s)
        failed.set()
        raise StoreError("store call", "No space left on device")

    monkeypatch.setattr(node.storage.store, "write", write)
    assert node.storage.batch_set_v1(KEYS[:2], indices(node, 2)) == [True, True]
    assert_eventually(lambda: node.storage.batch_exists(KEYS[:2]) == 2)


def test_a_backend_that_switched_itself_off_still_closes_its_store(node):
    from sglang_hicache_ext.errors import StoreClosedError

    node.storage._guard.disabled = "a bug"
    node.storage.close()
    with pytest.raises(StoreClosedError):
        node.storage.store.stats()


def test_a_pool_without_a_flag_per_slot_can_be_flushed_while_a_page_drains():
    from sglang_hicache_ext.sglang_adapter.quarantine import Quarantine

    class StatePool:
        """The books of SGLang's Mamba host pool."""

        def clear(self):
            self.free_slots = torch.arange(4)

        def alloc(self, need):
            taken, self.free_slots = self.free_slots[:need], self.free_slots[need:]
            return taken

        def free(self, slots):
            self.free_slots = torch.cat([self.free_slots, slots])
            return len(slots)

    pool, drain = StatePool(), HangingDrain()
    pool.clear()
    Quarantine(pool, 1).hold(pool.alloc(1).numpy(), drain)
    pool.clear()
    assert pool.free_slots.tolist() == [1, 2, 3]
    drain.event.set()
    assert sorted(pool.alloc(1).tolist() + pool.free_slots.tolist()) == [0, 1, 2, 3]
