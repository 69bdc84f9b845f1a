"""The PD adapter without an engine: messages, geometry, layers of a forward, and what becomes of rooms."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_hicache_ext.errors import CapabilityError, ConfigError  # noqa: E402
from sglang_hicache_ext.pd.hooks import Chunk, Reservation, SendState, SendStatus, TransferKey  # noqa: E402
from sglang_hicache_ext.sglang_adapter import pd, pd_geometry, pd_wire  # noqa: E402
from sglang_hicache_ext.sglang_adapter.pd_layers import LayeredForwards  # noqa: E402
from sglang_hicache_ext.sglang_adapter.pd_send import SendSide  # noqa: E402

PAGE = 4


# ---------------------------------------------------------------------------------------- messages and geometry


@pytest.mark.parametrize("reservation", [None, "pages", "none", "rest"])
def test_a_room_message_says_what_was_announced(reservation: Any) -> None:
    room = 77 | (pd_wire.REST if reservation == "rest" else 0)
    pages = np.arange(0 if reservation == "none" else 5, dtype=np.int64)
    given = None
    if reservation is not None:
        given = Reservation(TransferKey("decode-1", room, 3), pages, {"aux": np.array([4]), "state0.swa": pages[:2]})
    announced = pd_wire.Announced(77, "10.0.0.2", 4711, 2, 32, True, given)
    frames = pd_wire.room_message(announced)
    assert frames[0] == (pd_wire.WITHDRAWN if reservation == "rest" else pd_wire.ROOM)
    found = pd_wire.parse_room(frames)
    assert (found.room, found.source, found.required_dst_info_num) == (77, ("10.0.0.2", 4711), 2)
    assert (found.decode_prefix_len, found.is_promise, found.is_dummy) == (32, True, given is None)
    if given is not None:
        assert found.key == given.key
        assert found.reservation is not None
        assert found.reservation.pages.tolist() == pages.tolist()
        assert {k: v.tolist() for k, v in found.reservation.extra.items()} == {
            "aux": [4],
            "state0.swa": pages[:2].tolist(),
        }


def args_of(layers: int = 2, draft: int = 0, states: tuple[str, ...] = ()) -> Any:
    entries = 2 * (layers + draft)
    return types.SimpleNamespace(
        kv_data_ptrs=[4096 * (i + 1) for i in range(entries)],
        kv_item_lens=[64] * entries,
        kv_data_lens=[640] * entries,
        num_draft_entries=2 * draft,
        aux_data_ptrs=[1 << 20, 2 << 20],
        aux_item_lens=[8, 16],
        aux_data_lens=[80, 160],
        state_types=list(states),
        state_data_ptrs=[[3 << 20, 0]] * len(states),
        state_item_lens=[[32, 32]] * len(states),
        state_data_lens=[[320, 320]] * len(states),
    )


def test_geometry_numbers_layers_as_a_forward_fills_them() -> None:
    pool = types.SimpleNamespace(layer_num=2)
    found = pd_geometry.geometry_of(args_of(draft=1, states=("swa",)), pool, {"a": "b"}, -1)
    pages = [b.layer for b in found.buffers if b.space == "page"]
    assert pages == [0, 1, 0, 1, 2, 2]  # K of both layers, V of both, then the draft's
    assert {b.space: b.layer for b in found.buffers} == {"page": 2, "aux": 2, "state0.swa": 2}
    assert sum(b.space == "state0.swa" for b in found.buffers) == 1  # the elided one is left out
    assert [b.items for b in found.buffers if b.space == "aux"] == [10, 10]


def test_state_that_is_no_list_of_rows_is_refused_at_start() -> None:
    with pytest.raises(CapabilityError, match="dsa_tail"):
        pd_geometry.geometry_of(args_of(states=("dsa_tail",)), None, {}, -1)


def test_settings_come_from_one_variable_and_share_the_stores_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pd.VARIABLE, '{"pd_group": "1MiB"}')
    found = pd.read_settings('{"arbiter": "mlx5_0"}')
    assert (found.group, found.arbiter) == (1 << 20, "mlx5_0")
    monkeypatch.setenv(pd.VARIABLE, '{"pd_grup": 1}')
    with pytest.raises(ConfigError, match="pd_group"):
        pd.read_settings()
    monkeypatch.setenv(pd.VARIABLE, "{")
    with pytest.raises(ConfigError, match=pd.VARIABLE):
        pd.read_settings()


# ------------------------------------------------------------------------------------------- layers of a forward


@dataclass
class RecordedForward:
    chunks: list[Chunk]
    layers: list[int] = field(default_factory=list)
    finished: int = 0
    waited: int = 0

    def save_kv_layer(self, layer: int, ready: Any = None) -> None:
        self.layers.append(layer)

    def finish(self, ready: Any = None) -> None:
        self.finished += 1

    def wait_for_save(self, timeout_s: float) -> tuple[SendStatus, ...]:
        self.waited += 1
        return ()


class RecordingEndpoint:
    """A PrefillHooks that notes what it is asked and says of every key what ``states`` says."""

    def __init__(self) -> None:
        self.forwards: list[RecordedForward] = []
        self.states: dict[TransferKey, SendStatus] = {}
        self.aborted: list[tuple[TransferKey, str]] = []
        self.takes = True

    def start_save_kv(self, chunks: Any, *, layered: bool = True) -> RecordedForward:
        self.forwards.append(RecordedForward(list(chunks)))
        return self.forwards[-1]

    def offer(self, reservation: Reservation) -> bool:
        return self.takes

    def status(self, key: TransferKey) -> SendStatus:
        return self.states.get(key, SendStatus(SendState.OPEN, "", False))

    def abort(self, key: TransferKey, reason: str) -> None:
        self.aborted.append((key, reason))

    def forget(self, key: TransferKey) -> None:
        self.states.pop(key, None)


class MHATokenToKVPool:
    """Called like SGLang's, since the adapter knows pools by name."""

    layer_num, start_layer = 3, 0

    def __init__(self) -> None:
        self.written: list[int] = []

    def set_kv_buffer(self, layer: Any, loc_info: Any, *_: Any, **__: Any) -> None:
        self.written.append(layer.layer_id)


def scheduler_of(forward: Any) -> Any:
    mode = types.SimpleNamespace(is_extend=lambda: True, is_prebuilt=lambda: False, is_split_prefill=lambda: False)
    allocator = types.SimpleNamespace(page_size=PAGE, translate_kv_indices_for_transfer=lambda slots: slots)
    table = torch.arange(0, 400, dtype=torch.int64).reshape(4, 100)
    return types.SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=types.SimpleNamespace(req_to_token=table),
        maybe_send_cached_prefix_chunk=lambda req, allow_send: None,
        run_batch=forward,
        forward_mode=mode,
    )


ROOM = 5
KEY = TransferKey("decode-1", ROOM, 1)


def request(tokens: int = 20, start: int = 0) -> Any:
    announced = pd_wire.Announced(ROOM, "h", 1, 1, 0, False, Reservation(KEY, np.arange(tokens // PAGE)))
    manager = types.SimpleNamespace(transfer_infos={ROOM: {("h", 1): announced}})
    return types.SimpleNamespace(
        disagg_kv_sender=types.SimpleNamespace(kv_mgr=manager),
        bootstrap_room=ROOM,
        pending_bootstrap=False,
        origin_input_ids=[0] * tokens,
        start_send_idx=start,
        extend_end=tokens,
        disagg_decode_prefix_len=0,
        kv=types.SimpleNamespace(req_pool_idx=1),
    )


def layered(forward: Any, endpoint: RecordingEndpoint, pool: Any = None) -> tuple[LayeredForwards, Any, Any]:
    scheduler, pool = scheduler_of(forward), pool or MHATokenToKVPool()
    made = LayeredForwards(scheduler, pool, endpoint, lambda pages: pages >= 2)  # type: ignore[arg-type]
    return made, scheduler, pool


def batch_of(scheduler: Any, req: Any, tokens: int) -> Any:
    return types.SimpleNamespace(
        forward_mode=scheduler.forward_mode, reqs=[req], extend_num_tokens=tokens, hicache_consumer_index=-1
    )


def write_all(pool: Any, tokens: int, parts: int = 1, layers: int = 3) -> None:
    for layer in range(layers):
        for _ in range(parts):
            pool.set_kv_buffer(types.SimpleNamespace(layer_id=layer), torch.arange(tokens // parts))


PAGES = np.arange(100, 120, PAGE, dtype=np.int64) // PAGE


@pytest.mark.parametrize("parts", [1, 2])
def test_layers_are_reported_once_all_their_tokens_are_written(parts: int) -> None:
    endpoint, pool = RecordingEndpoint(), MHATokenToKVPool()
    made, scheduler, _ = layered(lambda batch: write_all(pool, 20, parts), endpoint, pool)
    assert made.attach() == ""
    scheduler.run_batch(batch_of(scheduler, request(), 20))
    rest, problem = made.take(ROOM, 0, PAGES)
    assert (rest, problem) == ([], "")
    (forward,) = endpoint.forwards
    assert forward.chunks[0].pages.tolist() == PAGES.tolist()
    assert not forward.chunks[0].is_last
    assert (forward.layers, forward.finished, forward.waited) == ([0, 1, 2], 1, 0)
    assert pool.written == [layer for layer in range(3) for _ in range(parts)]


def test_a_forward_whose_layers_are_hidden_goes_whole_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = RecordingEndpoint()
    made, scheduler, _ = layered(lambda batch: None, endpoint)
    made.attach()
    caplog.set_level("INFO")
    for _ in range(2):
        scheduler.run_batch(batch_of(scheduler, request(), 20))
        assert made.take(ROOM, 0, PAGES) == ([], "")
        made.forget(ROOM)
    assert [f.layers for f in endpoint.forwards] == [[], []]
    assert [f.finished for f in endpoint.forwards] == [1, 1]
    assert made.describe() == {"layered_forwards": 2, "hidden_forwards": 2}
    assert sum("captured graph" in r.message for r in caplog.records) == 1


def test_pages_that_the_cache_exchanged_are_waited_for() -> None:
    endpoint, pool = RecordingEndpoint(), MHATokenToKVPool()
    made, scheduler, _ = layered(lambda batch: write_all(pool, 20), endpoint, pool)
    made.attach()
    scheduler.run_batch(batch_of(scheduler, request(), 20))
    exchanged = PAGES.copy()
    exchanged[0] = 3
    assert made.take(ROOM, 0, exchanged) == ([], "")
    assert endpoint.forwards[0].waited == 1


def test_a_short_chunk_and_what_no_piece_covers_are_left_to_the_caller() -> None:
    endpoint, pool = RecordingEndpoint(), MHATokenToKVPool()
    made, scheduler, _ = layered(lambda batch: write_all(pool, 20), endpoint, pool)
    made.attach()
    scheduler.run_batch(batch_of(scheduler, request(tokens=20, start=8), 12))
    rest, problem = made.take(ROOM, 0, PAGES)
    assert problem == ""
    assert [(at, p.tolist()) for at, p in rest] == [(0, PAGES[:2].tolist())]
    made.forget(ROOM)
    scheduler.run_batch(batch_of(scheduler, request(tokens=20, start=16), 4))
    assert [(at, p.tolist()) for at, p in made.take(ROOM, 4, PAGES[4:])[0]] == [(4, PAGES[4:].tolist())]


def test_an_unknown_pool_is_left_alone() -> None:
    made, _, pool = layered(lambda batch: None, RecordingEndpoint(), types.SimpleNamespace(layer_num=1))
    assert "SimpleNamespace" in made.attach()
    assert not hasattr(pool, "set_kv_buffer")


# -------------------------------------------------------------------------------------------------------- rooms


class Manager:
    """What SendSide uses of SGLang's manager."""

    def __init__(self) -> None:
        self.transfer_infos: dict[int, Any] = {}
        self.request_status: dict[int, int] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.local_ip, self.rank_port, self.bootstrap_timeout = "10.0.0.1", 9000, 60.0
        self.kv_args = args_of()
        self.told: list[tuple[Any, int, str]] = []

    def resolve_kv_replica_factor(self, infos: Any) -> None: ...

    def update_status(self, room: int, status: int) -> None:
        self.request_status[room] = status

    def record_failure(self, room: int, reason: str) -> None: ...

    def send_kv_status_message(
        self, *, targets: Any, bootstrap_room: int, status: int, failure_reason: str = ""
    ) -> None:
        self.told.append((targets, bootstrap_room, failure_reason))

    def conclude_failure(self, *, bootstrap_room: int, failure_reason: str) -> None:
        self.update_status(bootstrap_room, 0)
        self.told.append(([], bootstrap_room, failure_reason))


def side(takes: bool = True) -> tuple[SendSide, Manager, RecordingEndpoint]:
    manager, endpoint = Manager(), RecordingEndpoint()
    endpoint.takes = takes
    return SendSide(manager, endpoint, frozenset({"aux"})), manager, endpoint  # type: ignore[arg-type]


def announced(room: int = ROOM, *, promise: bool = False, prefix: int = 0, rest: bool = False) -> pd_wire.Announced:
    key = TransferKey("decode-1", room | (pd_wire.REST if rest else 0), 2 if rest else 1)
    pages = np.arange(3, dtype=np.int64)
    return pd_wire.Announced(
        room, "10.0.0.2", 4711, 1, prefix, promise, Reservation(key, pages, {"aux": np.array([0])})
    )


def hand_over(sending: SendSide, pages: Any = (7, 8, 9)) -> None:
    sending.send(ROOM, np.array(pages), 0, True, aux_index=2, state_indices=None, ready=None)


def test_a_room_is_sent_and_succeeds_when_its_send_is_in_place() -> None:
    sending, manager, endpoint = side()
    sending.claim(ROOM)
    sending.announce(announced())
    hand_over(sending)
    (forward,) = endpoint.forwards
    chunk = forward.chunks[0]
    assert (chunk.is_last, chunk.pages.tolist(), chunk.extra["aux"].tolist()) == (True, [7, 8, 9], [2])
    sending.advance(ROOM, None)
    assert manager.request_status[ROOM] == 2
    assert not sending.is_settled(ROOM)
    endpoint.states[chunk.key] = SendStatus(SendState.SENT, "", True)
    sending.advance(ROOM, None)
    assert manager.request_status[ROOM] == 4
    assert sending.is_settled(ROOM)
    sending.release(ROOM)
    assert sending.describe()["rooms"] == 0


def test_prefill_holds_a_promised_room_until_the_promise_is_settled() -> None:
    sending, manager, endpoint = side()
    sending.claim(ROOM)
    first = announced(promise=True, prefix=8)
    sending.announce(first)
    hand_over(sending)
    assert first.key is not None
    endpoint.states[first.key] = SendStatus(SendState.SENT, "", True)
    sending.advance(ROOM, None)
    assert manager.request_status[ROOM] != 4, "the promise is still open"
    back = announced(prefix=4, rest=True)
    assert back.key is not None
    sending.withdraw(back)
    sending.kept(ROOM, back.source)
    asked: list[tuple[int, int]] = []

    def rest_of(start: int, pages: int) -> Any:
        asked.append((start, pages))
        return np.array([1, 2, 3])

    sending.advance(ROOM, rest_of)
    assert asked == [(4, 3)]
    assert manager.request_status[ROOM] != 4, "the withdrawn pages are on their way"
    assert endpoint.forwards[-1].chunks[0].pages.tolist() == [1, 2, 3]
    endpoint.states[back.key] = SendStatus(SendState.SENT, "", True)
    sending.advance(ROOM, rest_of)
    assert manager.request_status[ROOM] == 4


def test_a_promise_nobody_settles_ends_with_a_reason() -> None:
    sending, manager, endpoint = side()
    manager.bootstrap_timeout = -1.0
    sending.claim(ROOM)
    first = announced(promise=True)
    sending.announce(first)
    hand_over(sending)
    assert first.key is not None
    endpoint.states[first.key] = SendStatus(SendState.SENT, "", True)
    sending.advance(ROOM, None)
    assert manager.request_status[ROOM] == 0
    assert "promised" in manager.told[-1][2]


def test_a_room_that_no_request_claims_is_refused_with_both_sides_values() -> None:
    sending, manager, endpoint = side()
    sending.claim(1111)
    sending.announce(announced(2222))
    sending.sweep(60.0)
    assert manager.told == []
    sending.sweep(-1.0)
    (_, room, reason) = manager.told[0]
    assert room == 2222
    assert all(value in reason for value in ("2222", "1111", "10.0.0.2:4711", "10.0.0.1:9000"))
    assert endpoint.aborted[0][0].room == 2222
    assert sending.waiting_elsewhere(1111) == [2222]  # still named when that request's own time is up


def test_a_decode_side_that_comes_for_a_room_given_up_is_told_at_once() -> None:
    sending, manager, _ = side()
    sending.claim(ROOM)
    manager.request_status[ROOM] = 0
    sending.release(ROOM)
    sending.announce(announced())
    assert "given up" in manager.told[0][2]
    assert ROOM not in manager.transfer_infos
    sending.claim(ROOM)  # the number comes again with a new request
    sending.announce(announced())
    assert ROOM in manager.transfer_infos


def test_a_room_aborted_between_two_chunks_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_hicache_ext.sglang_adapter import pd_send

    sending, manager, endpoint = side()
    sending.claim(ROOM)
    sending.announce(announced())
    sending.abort(ROOM, "client gone")
    sending.sweep(60.0)
    assert sending.describe()["rooms"] == 1
    monkeypatch.setattr(pd_send, "ABORTED_S", -1.0)
    sending.sweep(60.0)
    assert sending.describe()["rooms"] == 0
    assert (manager.transfer_infos, manager.request_status) == ({}, {})
    assert endpoint.aborted == [(TransferKey("decode-1", ROOM, 1), "client gone")]


def test_a_reservation_that_is_not_taken_is_told_to_the_decode_side() -> None:
    sending, manager, _ = side(takes=False)
    sending.announce(announced())
    assert "10.0.0.2:4711" in manager.told[0][2]
    assert "10.0.0.2:4711" in sending.claim(ROOM)  # the request that comes for it ends at once
    assert sending.claim(ROOM) == ""
    manager.request_status[ROOM] = 1
    sending.announce(announced())
    assert manager.request_status[ROOM] == 0


# ------------------------------------------------------------------------------------------------ prefill servers


def decode_manager(monkeypatch: pytest.MonkeyPatch, answer: Any, **facts: Any) -> Any:
    """A manager without an engine; ``answer`` stands for SGLang's own look at the bootstrap server."""
    import cpu_kit

    cpu_kit.stand_in_for_torchvision()
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    from sglang_hicache_ext.sglang_adapter.pd_manager import HiCacheExtTransfer

    made = object.__new__(HiCacheExtTransfer)
    made.__dict__.update(
        refusals={}, prefill_info_table={}, attn_tp_size=2, is_mla_backend=False, kv_args=types.SimpleNamespace(page_size=16),
        kv_cache_dtype_str="bfloat16", **facts,
    )  # fmt: skip
    monkeypatch.setattr(CommonKVManager, "try_ensure_parallel_info", answer)
    return made


@pytest.mark.parametrize(("mla", "refused"), [(False, True), (True, False)])
def test_another_tp_size_is_refused_with_both_values_but_for_mla(
    monkeypatch: pytest.MonkeyPatch, mla: bool, refused: bool
) -> None:
    def answer(manager: Any, addr: str) -> bool:
        manager.prefill_info_table[addr] = types.SimpleNamespace(attn_tp_size=4)
        return True

    manager = decode_manager(monkeypatch, answer)
    manager.is_mla_backend = mla
    assert manager.try_ensure_parallel_info("p:1")
    reason = manager.refusals.get("p:1", "")
    assert bool(reason) is refused
    if refused:
        assert all(value in reason for value in ("prefill p:1 has 4", "this decode server has 2"))
        assert manager.prefill_info_table["p:1"].attn_tp_size == 2, "requests come on to where they are refused"


def test_a_prefill_server_that_sglang_refuses_costs_requests_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(manager: Any, addr: str) -> bool:
        raise RuntimeError("Page size mismatch: prefill server has page_size=64, but decode server has page_size=16.")

    manager = decode_manager(monkeypatch, answer)
    assert manager.try_ensure_parallel_info("p:1")
    assert "page_size=64" in manager.refusals["p:1"]
    manager.forget_prefill("p:1")
    assert (manager.refusals, manager.prefill_info_table) == ({}, {})
