"""L3 in SGLang's event stream: what a router decodes, in which order, and that it never believes in a page that is gone."""

import json
import os
import subprocess
import sys
import uuid

import numpy as np
import pytest

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

pytest.importorskip("sglang")
zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

PAGE_TOKENS = 16
TOKENS = list(range(6 * PAGE_TOKENS))


class Router:
    """SGLang's publisher on one side of a socket; on the other its wire format, decoded by its own types."""

    def __init__(self, tree, config, endpoint):
        from sglang.srt.disaggregation.kv_events import KVEventBatch
        from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher

        self.publisher = SchedulerKvEventsPublisher(
            kv_events_config=config,
            tree_cache=tree,
            send_metrics_from_scheduler=None,
            max_running_requests=1,
            max_total_num_tokens=1,
            get_stats=dict,
        )
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._next = 0
        self._meet()

    def _meet(self):
        """A subscriber misses what is sent before it is connected: send until something comes."""
        from sglang.srt.disaggregation.kv_events import AllBlocksCleared, KVEventBatch

        sent = 0
        while sent < 400:
            sent += 1
            self.publisher.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
            if self._socket.poll(50):
                break
        got = 0
        while self._socket.poll(2000):
            seq = int.from_bytes(self._socket.recv_multipart()[1], "big")
            got = seq + 1
            if got == sent:
                break
        assert got == sent
        self._next = got

    def hear(self):
        """Have SGLang publish; return the decoded events, numbers without a gap."""
        self.publisher.publish_kv_events()
        events = []
        while self._socket.poll(300):
            _, seq, payload = self._socket.recv_multipart()
            assert int.from_bytes(seq, "big") == self._next
            self._next += 1
            events += self._decode(payload).events
        return events

    def close(self):
        self._socket.close(linger=0)
        self.publisher.kv_event_publisher.shutdown()


def hashes(events, kind, medium):
    return [h for e in events if type(e).__name__ == kind and e.medium == medium for h in e.block_hashes]


@pytest.fixture
def publisher_rank(kit):
    """This process is the one that publishes, as in a server of one rank."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_tp_rank=0, attn_cp_rank=0, attn_dp_size=1, attn_dp_rank=0, dp_rank=0):
        yield


@pytest.fixture
def served(kit, nvme, publisher_rank):
    endpoint = f"ipc://@hicache-ext-{uuid.uuid4().hex}"
    config = json.dumps({"publisher": "zmq", "endpoint": endpoint})
    node = kit.Node(kit.Shape("mha", "page_first", PAGE_TOKENS), "nvme", {**nvme, "kv_events": True}, kv_events=config)
    router = Router(node.tree, config, endpoint)
    yield node, router
    router.close()
    node.close()


def test_a_router_hears_of_l3_after_l2_in_the_same_words(served):
    from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

    node, router = served
    node.produce(TOKENS)
    events = router.hear()
    expected = [hash_str_to_int64(h) for h in get_hash_str(node.key(TOKENS), None, page_size=PAGE_TOKENS)]
    for medium in ("GPU", "CPU_PINNED", "DISK"):
        assert hashes(events, "BlockStored", medium) == expected
    order = [getattr(e, "medium", None) for e in events]
    assert order.index("GPU") < order.index("CPU_PINNED") < order.index("DISK")
    assert "CPU_PINNED" not in order[order.index("DISK") :]
    disk = [e for e in events if getattr(e, "medium", None) == "DISK"]
    assert [t for e in disk for t in e.token_ids] == TOKENS
    assert disk[0].parent_block_hash is None
    assert all(e.block_size == PAGE_TOKENS for e in disk)
    assert node.storage.describe()["kv_events_pages"] == 6
    assert router.hear() == []


def test_clear_and_detach_take_the_pages_back(served):
    node, router = served
    node.produce(TOKENS)
    stored = hashes(router.hear(), "BlockStored", "DISK")
    assert len(stored) == 6
    assert node.storage.clear()
    assert sorted(hashes(router.hear(), "BlockRemoved", "DISK")) == sorted(stored)
    more = list(range(5000, 5000 + 4 * PAGE_TOKENS))
    node.produce(more)
    again = hashes(router.hear(), "BlockStored", "DISK")
    assert len(again) == 4
    ok, message = node.tree.detach_storage_backend()
    assert ok, message
    assert sorted(hashes(router.hear(), "BlockRemoved", "DISK")) == sorted(again)
    assert router.hear() == []


def test_after_all_blocks_cleared_a_page_is_told_again_when_it_is_mentioned(served):
    node, router = served
    node.produce(TOKENS)
    stored = hashes(router.hear(), "BlockStored", "DISK")
    node.tree.reset()
    events = router.hear()
    assert "AllBlocksCleared" in [type(e).__name__ for e in events]
    assert hashes(events, "BlockStored", "DISK") == []
    assert node.prefetch(TOKENS) == len(TOKENS)  # from L3 back into L2: SGLang says so, and then so do we
    heard = router.hear()
    node.storage.kv_events.look()
    heard += router.hear()
    assert hashes(heard, "BlockStored", "DISK") == stored


def test_events_of_sglang_go_out_when_ours_fail(served, caplog):
    node, router = served
    node.storage.kv_events._ledger.learn = lambda event: 1 / 0
    node.produce(TOKENS)
    events = router.hear()
    assert len(hashes(events, "BlockStored", "CPU_PINNED")) == 6
    assert hashes(events, "BlockStored", "DISK") == []
    assert "SGLang's own go on" in caplog.text


def test_without_the_option_nothing_is_added(kit, nvme):
    config = json.dumps({"publisher": "null"})
    node = kit.Node(kit.Shape("mha", "page_first", PAGE_TOKENS), "nvme", nvme, kv_events=config)
    node.produce(TOKENS)
    assert {getattr(e, "medium", None) for e in node.tree.take_events()} - {None} == {"GPU", "CPU_PINNED"}
    assert node.storage.kv_events is None
    node.close()


def test_the_option_without_sglangs_events_is_refused_in_one_message(kit, nvme):
    with pytest.raises(ConfigError, match="--kv-events-config"):
        kit.Node(kit.Shape("mha", "page_first", PAGE_TOKENS), "nvme", {**nvme, "kv_events": True})


def test_a_store_without_a_place_is_refused(kit):
    extra = {
        "backend_name": "memory",
        "module_path": "sglang_hicache_ext.sglang_adapter.storage",
        "class_name": "HiCacheExtStorage",
        "interface_v1": 1,
        "kv_events": True,
    }
    config = json.dumps({"publisher": "null"})
    with pytest.raises(ConfigError, match="belong to no node"):
        kit.Node(kit.Shape("mha", "page_first", PAGE_TOKENS), "dynamic", extra, kv_events=config)


# ---- the books, against a real store


class Books:
    """A store that is small enough to reclaim, SGLang's words about its pages, and a router that believes what it hears."""

    PAGE_BYTES = 64 << 10

    def __init__(self, path):
        from sglang_hicache_ext.sglang_adapter.event_ledger import EventLedger

        self.path = path
        config = HiCacheExtConfig(path=(str(path),), capacity=48 << 20, segment=4 << 20, engine="posix", hold_s=0.0)
        self.store = NvmeStore(config)
        self.ns = self.store.namespace(Fingerprint(model="events", page_tokens=PAGE_TOKENS))
        self.metrics = Metrics()
        self.ledger = EventLedger(self.metrics)
        self.store.changes.watch(self.ns, self.ledger.hear)
        self.believed = set()
        self.rng = np.random.default_rng(3)

    def mention(self, keys):
        from sglang.srt.disaggregation.kv_events import BlockStored

        for key in keys:
            self.ledger.learn(
                BlockStored(
                    block_hashes=[int.from_bytes(key[:8], "big", signed=True)],
                    parent_block_hash=None,
                    token_ids=list(range(PAGE_TOKENS)),
                    block_size=PAGE_TOKENS,
                    lora_id=None,
                    medium="GPU",
                )
            )

    def write(self, pages):
        keys = [self.rng.bytes(32) for _ in range(pages)]
        self.mention(keys)
        memory = self.rng.integers(0, 256, (pages, self.PAGE_BYTES), dtype=np.uint8)
        self.store.write(self.ns, keys, regions_of_array(memory))
        return keys

    def tell(self):
        while steps := self.ledger.steps(limit=50):
            for head, words in steps:
                assert (head in self.believed) == (words is None), "told twice"
                (self.believed.discard if words is None else self.believed.add)(head)

    def look(self):
        for heads in (self.ledger.take_asked(1 << 20), self.ledger.next_announced(1 << 20)):
            self.ledger.settle(heads, self.store.changes.present_heads(self.ns, heads).tolist())
        self.tell()

    @property
    def present(self):
        return {key[:8] for key, _ in self.store.iter_pages(self.ns)}

    def settled(self):
        """Reclaim runs in the background: wait until it has nothing to do."""
        self.store._space._background.submit(lambda: None).result(30)
        self.tell()


@pytest.fixture
def books(tmp_path):
    books = Books(tmp_path / "kv")
    yield books
    books.store.close()


def test_a_router_never_believes_in_a_page_that_reclaim_took(books):
    for _ in range(40):
        books.write(32)
        books.tell()
    books.settled()
    assert books.store.metrics.snapshot().counters["reclaimed_pages"] > 100
    assert books.believed == books.present
    counters = books.metrics.snapshot().counters
    assert counters["kv_events_stored"] - counters["kv_events_removed"] == len(books.believed)


def test_a_corrupt_page_is_taken_back(books):
    keys = books.write(8)
    books.tell()
    for segment in (books.path / "segments").iterdir():
        with segment.open("r+b") as file:
            file.seek(8192 + 3 * books.PAGE_BYTES)
            file.write(b"\xff" * 64)
    outcomes = books.store.verify(books.ns, keys, books.PAGE_BYTES)
    bad = {key[:8] for key, outcome in zip(keys, outcomes, strict=True) if str(outcome) == "corrupt"}
    assert len(bad) == 1
    books.tell()
    assert books.believed == {key[:8] for key in keys} - bad == books.present


@pytest.mark.slow
def test_pages_that_another_process_removed_or_wrote_are_found_by_looking(books):
    keys = books.write(8)
    books.tell()
    gc = [
        sys.executable,
        "-m",
        "sglang_hicache_ext.cli.main",
        "gc",
        str(books.path),
        "--namespace",
        "events",
        "--apply",
    ]
    subprocess.run(gc, check=True, capture_output=True, timeout=60, env=os.environ)
    assert books.believed and not books.present
    books.look()
    assert books.believed == set()
    books.store.changes.unwatch()  # as if another process wrote: nobody hears of it
    memory = np.zeros((8, books.PAGE_BYTES), np.uint8)
    books.store.write(books.ns, keys, regions_of_array(memory))
    books.mention(keys[:3])
    books.look()
    assert books.believed == {k[:8] for k in keys[:3]}


def test_the_queue_is_bounded_and_drops_are_counted(books, monkeypatch):
    from sglang_hicache_ext.sglang_adapter import event_ledger

    monkeypatch.setattr(event_ledger, "MAX_PENDING", 10)
    monkeypatch.setattr(event_ledger, "MAX_ANNOUNCED", 12)
    books.write(32)
    assert books.metrics.snapshot().counters["kv_events_dropped"] == 22
    books.tell()
    assert len(books.believed) == 10
    books.look()  # nothing is lost for good: what SGLang mentioned is looked up, at most ten at a time
    assert len(books.believed) <= 12
    assert books.believed <= books.present


def test_pages_that_sglang_hashes_differently_are_counted_not_told(books):
    books.ledger.hear([(bytes(32), True)])
    assert books.ledger.steps() == []
    assert books.metrics.snapshot().counters["kv_events_unknown"] == 1


def test_other_weights_take_everything_back(books):
    books.write(4)
    books.tell()
    books.ledger.forget_all()
    books.tell()
    assert books.believed == set()
