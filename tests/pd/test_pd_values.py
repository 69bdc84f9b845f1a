"""Geometry, groups, wire format: pure values."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer, PeerMismatchError
from sglang_hicache_ext.pd.groups import GroupPlanner
from sglang_hicache_ext.pd.handshake import DECODE, PREFILL, Identity, check_peer
from sglang_hicache_ext.pd.hooks import Reservation, TransferKey
from sglang_hicache_ext.pd.mooncake import runs
from sglang_hicache_ext.pd.settings import PdSettings
from sglang_hicache_ext.pd.wire import (
    FrameReader,
    FrameType,
    Note,
    NoteKind,
    WireError,
    frame,
    pack_end,
    pack_reservation,
    unpack_end,
    unpack_note,
    unpack_reservation,
)


def geometry(
    layers: int = 4, item_bytes: int = 100, *, items: int = 8, facts: dict[str, str] | None = None
) -> Geometry:
    rows = [
        LayerBuffer(f"{kind}.{layer}", layer, 4096 * (1 + layer), item_bytes, items)
        for layer in range(layers)
        for kind in "kv"
    ]
    return Geometry(
        (*rows, LayerBuffer("hidden", layers, 64, 8, 4, "aux")), facts or {"dtype": "bfloat16", "tp": "0/1"}
    )


@given(
    layers=st.integers(1, 80),
    pages=st.integers(0, 300),
    group=st.integers(1, 1 << 20),
    layered_min=st.integers(0, 1 << 20),
    layered=st.booleans(),
)
def test_groups_cover_every_layer_once_and_are_large_enough(
    layers: int, pages: int, group: int, layered_min: int, layered: bool
) -> None:
    planner = GroupPlanner(geometry(layers), PdSettings(group=group, layered_min=layered_min))
    plan = planner.plan(pages, layered=layered)
    if pages == 0:
        assert plan == ()
        return
    assert [layer for g in plan for layer in range(g.start, g.stop)] == list(range(layers))
    assert sorted(i for g in plan for i in g.buffers) == list(range(2 * layers))
    sizes = [200 * pages * (g.stop - g.start) for g in plan]
    if not layered or sum(sizes) < layered_min:
        assert len(plan) == 1
    if len(plan) > 1:
        assert min(sizes) >= group
        assert sizes[-1] - 200 * pages < group, "the last group, which stays visible, is as small as it may be"


def test_extra_buffers_are_one_group_of_their_own() -> None:
    extra = GroupPlanner(geometry(), PdSettings()).extra
    assert extra is not None
    assert extra.buffers == (8,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"buffers": ()}, "no buffer"),
        ({"buffers": (LayerBuffer("k", 0, 1, 1, 1), LayerBuffer("k", 1, 1, 1, 1))}, "used twice"),
        ({"buffers": (LayerBuffer("k", 0, 1, 0, 1),)}, "positive"),
        ({"buffers": (LayerBuffer("k", 0, 1, 1, 1), LayerBuffer("v", 2, 1, 1, 1))}, r"layers \[1\] have no buffer"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(change: dict[str, tuple[LayerBuffer, ...]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Geometry(**change)


def test_page_buffers_on_two_devices_are_refused() -> None:
    two = Geometry((LayerBuffer("k", 0, 1, 1, 1), LayerBuffer("v", 0, 1, 1, 1, device=0)))
    with pytest.raises(ConfigError, match=r"devices \[-1, 0\]"):
        GroupPlanner(two, PdSettings())


def identity(role: str, shape: Geometry, transport: str = "nixl") -> Identity:
    return Identity(role, f"{role}-1", "127.0.0.1:1", transport, shape, b"\0opaque")


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (geometry(4), geometry(5), "layers: here 5, peer 6"),
        (geometry(4), geometry(4, 50), "item_bytes: here 100, peer 50"),
        (geometry(), geometry(facts={"dtype": "float8", "tp": "0/1"}), "dtype: here 'bfloat16', peer 'float8'"),
        (geometry(), geometry(facts={"dtype": "bfloat16"}), "tp: here '0/1', peer 'not given'"),
    ],
)
def test_two_sides_that_do_not_fit_are_named_with_both_values(mine: Geometry, theirs: Geometry, words: str) -> None:
    with pytest.raises(PeerMismatchError) as e:
        check_peer(identity(DECODE, mine).words(), identity(PREFILL, theirs).words())
    assert words in str(e.value)


@pytest.mark.parametrize(("field", "value"), [("version", "9.9"), ("protocol", 99), ("transport", "mooncake")])
def test_mixed_versions_and_drivers_are_refused(field: str, value: object) -> None:
    mine = identity(DECODE, geometry()).words()
    theirs = {**identity(PREFILL, geometry()).words(), field: value}
    with pytest.raises(PeerMismatchError, match=f"{field}: here {mine[field]!r}, peer {value!r}"):
        check_peer(mine, theirs)


def test_pools_of_two_sizes_fit() -> None:
    peer = check_peer(identity(DECODE, geometry()).words(), identity(PREFILL, geometry(items=99)).words())
    assert peer.metadata == b"\0opaque"
    assert [b.items for b in peer.buffers] == [99] * 8 + [4]


def test_an_identity_of_something_else_is_no_mismatch() -> None:
    with pytest.raises(WireError):
        check_peer(identity(DECODE, geometry()).words(), {"hello": "world"})


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_note_or_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert unpack_note(data).pack() == data


def test_notes_and_ends_come_back_as_they_went() -> None:
    note = Note(NoteKind.EXTRA, (1 << 64) - 1, 7, 3, 200, 0, 33, True)
    assert unpack_note(note.pack()) == note
    key = TransferKey("decode-1", 5, 6)
    assert unpack_end(pack_end(key, "why"), "decode-1") == (key, "why")


def test_a_reservation_comes_back_as_it_went() -> None:
    sent = Reservation(
        TransferKey("d", 1, 2), np.arange(5) * 3, {"aux": np.array([4]), "state": np.array([], np.int64)}
    )
    got = unpack_reservation(pack_reservation(sent))
    assert got.key == sent.key
    assert got.pages.tolist() == sent.pages.tolist()
    assert {k: v.tolist() for k, v in got.extra.items()} == {"aux": [4], "state": []}


@given(cut=st.integers(0, 100))
def test_a_reservation_cut_short_is_refused(cut: int) -> None:
    whole = pack_reservation(Reservation(TransferKey("d", 1, 2), np.arange(5)))
    with pytest.raises(WireError):
        unpack_reservation(whole[: min(cut, len(whole) - 1)])


@given(st.lists(st.binary(max_size=30), max_size=5), st.integers(1, 7))
def test_frames_survive_any_cutting(bodies: list[bytes], step: int) -> None:
    data = b"".join(frame(FrameType.GROUP, body) for body in bodies)
    reader = FrameReader()
    found = [f for i in range(0, len(data), step) for f in reader.feed(data[i : i + step])]
    assert found == [(FrameType.GROUP, body) for body in bodies]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\0\0\0\0\1", b"\1\0\0\0\xff"])
def test_another_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        FrameReader().feed(data)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_runs_cover_all_and_are_contiguous(pairs: list[tuple[int, int]]) -> None:
    here, there = (np.array([p[i] for p in pairs], np.int64) for i in (0, 1))
    found = runs(here, there)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(len(pairs)))
    for start, stop in found:
        assert (np.diff(here[start:stop]) == 1).all()
        assert (np.diff(there[start:stop]) == 1).all()


def test_settings_name_the_key() -> None:
    assert PdSettings.parse({"pd_group": "1MiB"}).group == 1 << 20
    with pytest.raises(ConfigError, match="pd_transport"):
        PdSettings.parse({"pd_transport": "rdma"})
