"""The contract of the hooks over the simulated network: what the scheduler may do with pages, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.arbiter import Arbiter
from sglang_hicache_ext.errors import InvariantError
from sglang_hicache_ext.pd.decode import DecodeEndpoint, DecodeLoad
from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer
from sglang_hicache_ext.pd.hooks import Chunk, LoadRequest, LoadState, Reservation, SendState, TransferKey
from sglang_hicache_ext.pd.prefill import PrefillEndpoint
from sglang_hicache_ext.pd.settings import PdSettings
from sglang_hicache_ext.pd.wire import FrameType, pack_end, pack_words
from sglang_hicache_ext.testing.clock import ManualClock
from sglang_hicache_ext.testing.pd_sim import SimLinks, SimNet, SimTransport

TARGET, DRAFT, SLOTS = 3, 1, 8


class Event:
    """An engine's event that happens when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def is_done(self) -> bool:
        return self.done


class Bench:
    """A connected pair on a manual clock. ``run`` moves everything until ``until`` holds."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.net = SimNet(1, self.clock)
        self.settings = PdSettings(**{"group": 1, "layered_min": 0, "deadline_s": 5.0, "drain_s": 1.0, **settings})
        self.source, self.target = np.zeros((2, TARGET + DRAFT, SLOTS, 8), np.int64)
        self.hidden = np.zeros((2, SLOTS, 8), np.int64)
        self.prefill = PrefillEndpoint(
            self.shape(self.source, self.hidden[0]), SimTransport(self.net, "p"), self.settings, clock=self.clock,
            links=SimLinks(self.net, "p"), is_threaded=False, instance="p",
        )  # fmt: skip
        self.decode = DecodeEndpoint(
            self.shape(self.target, self.hidden[1]), SimTransport(self.net, "d"), self.settings, clock=self.clock,
            links=SimLinks(self.net, "d"), is_threaded=False, instance="d",
        )  # fmt: skip
        self.net.connect("d", "p")
        self.net.push("d", "p", FrameType.HELLO, pack_words(self.decode.identity.words()))
        self.run(lambda: bool(self.prefill.peers))

    def shape(self, kv: Any, hidden: Any) -> Geometry:
        rows = [LayerBuffer(f"kv.{i}", i, kv[i].ctypes.data, 64, SLOTS) for i in range(TARGET + DRAFT)]
        return Geometry(
            (*rows, LayerBuffer("draft_hidden", TARGET + DRAFT, hidden.ctypes.data, 64, SLOTS, "aux")), {"dtype": "i8"}
        )

    def run(self, until: Callable[[], bool], seconds: float = 3.0) -> bool:
        end = self.clock.now() + seconds
        while not until() and self.clock.now() < end:
            self.clock.advance(0.01)
            self.net.tick()
            self.prefill.step(0.0)
            self.decode.step(0.0)
        return until()

    def rest(self, seconds: float = 0.5) -> None:
        self.run(lambda: False, seconds)

    def load(self, pages: tuple[int, ...] = (5, 6), room: int = 1, deadline_s: float = 10.0, **kw: Any) -> DecodeLoad:
        request = LoadRequest("p", room, np.array(pages, np.int64), deadline_s, {"aux": np.array([1])})
        return self.decode.start_load_kv(request, **kw)

    def reserved(self, room: int = 1) -> Reservation:
        assert self.run(lambda: bool(self.prefill.reservations(room)))
        return self.prefill.reservations(room)[0]


def chunk(reservation: Reservation, **changes: Any) -> Chunk:
    base = {
        "key": reservation.key,
        "first": 0,
        "pages": np.array([0, 1]),
        "is_last": True,
        "extra": {"aux": np.array([3])},
    }
    return Chunk(**{**base, **changes})


def test_look_ahead_waits_for_the_layers_it_needs() -> None:
    b = Bench()
    load = b.load()
    forward = b.prefill.start_save_kv([chunk(b.reserved())])
    draft = range(TARGET, TARGET + DRAFT)
    assert load.lookahead(4, draft) == 0
    for layer in range(TARGET):
        forward.save_kv_layer(layer)
    b.rest()
    assert load.lookahead(4, range(TARGET)) == 4, "verifying needs the target's layers only"
    assert load.lookahead(4, draft) == 0, "proposing needs the draft's"
    forward.save_kv_layer(TARGET)
    b.rest()
    assert load.lookahead(4, draft) == 4
    assert load.lookahead(4, [*draft, TARGET + DRAFT]) == 0, "and its hidden states come with the end of the last chunk"
    assert load.status().state is LoadState.LANDING
    forward.finish()
    assert b.run(lambda: load.status().state is LoadState.COMPLETE)
    assert load.lookahead(4, [*draft, TARGET + DRAFT]) == 4


def test_pages_are_published_once_and_only_when_complete() -> None:
    b = Bench()
    load = b.load()
    with pytest.raises(InvariantError, match="reserved"):
        load.publish()
    b.prefill.start_save_kv([chunk(b.reserved())]).finish()
    b.run(lambda: load.status().state is LoadState.COMPLETE)
    assert load.publish().tolist() == [5, 6]
    with pytest.raises(InvariantError, match="twice"):
        load.publish()


def test_a_group_waits_for_the_events_of_its_layers_and_of_its_chunk() -> None:
    b = Bench()
    load, written, loaded_back = b.load(), Event(), Event()
    forward = b.prefill.start_save_kv([chunk(b.reserved(), ready=loaded_back)])
    forward.save_kv_layer(0, written)
    b.rest()
    assert b.net.writes == [] and load.status().state is LoadState.RESERVED
    written.done = True
    b.rest()
    assert load.status().state is LoadState.RESERVED, "the pages before it are still being loaded"
    loaded_back.done = True
    b.rest()
    assert load.status().state is LoadState.LANDING
    forward.finish()
    assert b.run(lambda: load.status().state is LoadState.COMPLETE)


def test_chunks_may_come_in_any_order_and_the_last_one_without_pages() -> None:
    b = Bench()
    load = b.load()
    key = b.reserved()
    b.prefill.start_save_kv([chunk(key, first=1, pages=np.array([1]), is_last=False, extra={})]).finish()
    b.prefill.start_save_kv([chunk(key, first=0, pages=np.array([0]), is_last=False, extra={})]).finish()
    b.rest()
    assert load.status().landed_pages == 2 and load.status().state is LoadState.LANDING
    b.prefill.start_save_kv([chunk(key, first=2, pages=np.array([], np.int64))]).finish()
    assert b.run(lambda: load.status().state is LoadState.COMPLETE)
    assert b.run(lambda: b.prefill.status(key.key).state is SendState.SENT)


def test_the_last_chunk_may_come_first() -> None:
    b = Bench()
    load = b.load()
    key = b.reserved()
    last = b.prefill.start_save_kv([chunk(key, first=1, pages=np.array([1]))])
    last.finish()
    b.rest()
    assert b.prefill.status(key.key).state is SendState.OPEN
    assert last._is_over(), "that chunk is in place"
    b.prefill.start_save_kv([chunk(key, first=0, pages=np.array([0]), is_last=False, extra={})]).finish()
    assert b.run(lambda: load.status().state is LoadState.COMPLETE)
    assert b.run(lambda: b.prefill.status(key.key).state is SendState.SENT)


def test_a_page_that_never_came_keeps_a_load_open() -> None:
    """Groups are counted by what they cover: a last chunk alone completes nothing."""
    b = Bench()
    load = b.load(deadline_s=1.0)
    b.prefill.start_save_kv([chunk(b.reserved(), pages=np.array([0]))]).finish()
    assert b.run(lambda: load.status().state is LoadState.TIMED_OUT)
    drain = load.release()
    assert b.run(drain.is_done)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first": 1}, "pages 1 to 3 of 2 reserved"),
        ({"first": -1}, "pages -1 to 1 of 2 reserved"),
        ({"pages": np.array([0, SLOTS])}, f"page ids from 0 to {SLOTS}, the prefill side has {SLOTS}"),
        ({"extra": {}}, "extra items {} for {'aux': 1} reserved"),
        ({"extra": {"aux": np.array([99])}}, "aux ids from 99 to 99"),
    ],
)
def test_a_chunk_that_does_not_fit_ends_the_request_on_both_sides(change: dict[str, Any], words: str) -> None:
    b = Bench()
    load = b.load()
    b.prefill.start_save_kv([chunk(b.reserved(), **change)]).finish()
    assert b.run(lambda: load.status().state is LoadState.FAILED)
    assert words in load.status().reason and load.status().is_settled
    assert not b.target.any()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (LoadRequest("q", 1, np.array([1]), 1.0, {"aux": np.array([1])}), "not connected to q"),
        (LoadRequest("p", -1, np.array([1]), 1.0, {"aux": np.array([1])}), "room -1"),
        (LoadRequest("p", 1, np.array([1, 1]), 1.0, {"aux": np.array([1])}), "page id is given twice"),
        (LoadRequest("p", 1, np.array([SLOTS]), 1.0, {"aux": np.array([1])}), f"the decode side has {SLOTS}"),
        (LoadRequest("p", 1, np.array([1]), 1.0), "spaces [] are given, ['aux'] are registered"),
    ],
)
def test_a_load_that_cannot_be_is_failed_and_settled(request_: LoadRequest, words: str) -> None:
    status = Bench().decode.start_load_kv(request_).status()
    assert status.state is LoadState.FAILED and status.is_settled
    assert words in status.reason


def test_more_loads_than_may_be_open_are_refused() -> None:
    b = Bench(max_open=2)
    states = [b.load((slot,), room=slot).status().state for slot in (1, 2, 3)]
    assert states == [LoadState.RESERVED, LoadState.RESERVED, LoadState.FAILED]


def test_an_abort_that_overtakes_its_reservation_is_remembered() -> None:
    b = Bench()
    load = b.load(announce=False)
    load.abort("the client left")
    assert b.run(load.release().is_done), "prefill answers for an epoch it has never seen"
    b.prefill._call(lambda: None)
    assert not b.prefill.offer(load.reservation)
    assert b.prefill.reservations(1) == ()


def test_a_reservation_may_be_carried_by_the_caller() -> None:
    b = Bench()
    load = b.load(announce=False)
    b.rest()
    assert b.prefill.reservations(1) == ()
    assert b.prefill.offer(load.reservation)
    b.prefill.start_save_kv([chunk(b.prefill.reservations(1)[0])]).finish()
    assert b.run(lambda: load.status().state is LoadState.COMPLETE)


def test_a_settled_message_for_another_room_changes_nothing() -> None:
    b = Bench()
    load = b.load()
    b.net.push("p", "d", FrameType.SETTLED, pack_end(TransferKey("d", 99, load.key.epoch), "wrong room"))
    b.rest()
    assert load.status().state is LoadState.RESERVED


def test_one_forward_serves_several_requests() -> None:
    b = Bench()
    loads = [b.load((1, 2), 1), b.load((3, 4), 2)]
    chunks = [chunk(b.reserved(1)), chunk(b.reserved(2), pages=np.array([2, 3]))]
    b.source[:] = np.arange(SLOTS)[None, :, None]
    forward = b.prefill.start_save_kv(chunks)
    for layer in range(TARGET + DRAFT):
        forward.save_kv_layer(layer)
    forward.finish()
    assert b.run(lambda: all(load.status().state is LoadState.COMPLETE for load in loads))
    assert b.target[:, 1:5, 0].tolist() == [[0, 1, 2, 3]] * (TARGET + DRAFT)


def test_transfers_announce_themselves_to_the_arbiter(tmp_path: Any) -> None:
    b = Bench()
    arbiter = Arbiter("pd-test", folder=str(tmp_path))
    b.prefill._arbiter = arbiter
    b.net.node("p").is_paused = True  # writes mostly wait
    b.load()
    b.prefill.start_save_kv([chunk(b.reserved())]).finish()
    b.run(lambda: bool(b.net.writes), 1.0)
    seen = arbiter.describe()["pd_gap_ms"]
    assert seen, "a transfer holds a slot of the arbiter"
    b.net.node("p").is_paused = False
    b.rest()
    arbiter.close(remove=True)
