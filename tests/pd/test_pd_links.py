"""Control links over real sockets: frames, strangers, broken links, and the proof that a process has ended."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.pd import links as links_module
from sglang_hicache_ext.pd.decode import DecodeEndpoint
from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer
from sglang_hicache_ext.pd.hooks import Chunk, LoadRequest, LoadState, SendState
from sglang_hicache_ext.pd.links import Frame, Lost, TcpLinks, instance_at, prove_end, split_address
from sglang_hicache_ext.pd.prefill import PrefillEndpoint
from sglang_hicache_ext.pd.settings import PdSettings
from sglang_hicache_ext.pd.transport import Rows, WriteState
from sglang_hicache_ext.pd.wire import FrameType, frame


def until(is_so: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


@pytest.fixture
def two() -> Iterator[tuple[TcpLinks, TcpLinks]]:
    """``one`` has called ``other``, which knows it as "?1"."""
    one, other = TcpLinks("127.0.0.1"), TcpLinks("127.0.0.1")
    one.adopt("other", socket.create_connection(split_address(other.address), timeout=5))
    other.poll(5.0)
    yield one, other
    one.close()
    other.close()


def test_frames_arrive_in_order_and_a_name_is_taken_over(two: tuple[TcpLinks, TcpLinks]) -> None:
    one, other = two
    bodies = [bytes([i]) * 100_000 for i in range(20)]
    for body in bodies:
        one.send("other", FrameType.GROUP, body)
    found: list[Any] = []
    until(lambda: found.extend(other.poll(0.05)) or one.poll(0.0) or len(found) == 20)
    assert found == [Frame("?1", FrameType.GROUP, body) for body in bodies]
    other.rename("?1", "one")
    assert other.is_up("one") and not other.is_up("?1")
    assert other.send("one", FrameType.READY) and not other.send("?1", FrameType.READY)
    assert until(lambda: one.poll(0.05)) == [Frame("other", FrameType.READY, b"")]


def test_a_closed_link_is_told_once_and_a_dropped_one_not_at_all(two: tuple[TcpLinks, TcpLinks]) -> None:
    one, other = two
    other.send("?1", FrameType.REFUSED, b"bye")
    other.drop("?1")
    found: list[Any] = []
    until(lambda: found.extend(one.poll(0.05)) or len(found) == 2)
    assert found[0] == Frame("other", FrameType.REFUSED, b"bye")
    assert isinstance(found[1], Lost)
    assert other.poll(0.05) == [] and one.poll(0.05) == []


def test_a_stranger_is_cut_off(two: tuple[TcpLinks, TcpLinks]) -> None:
    _, other = two
    with socket.create_connection(split_address(other.address), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert isinstance(until(lambda: other.poll(0.05))[0], Lost)
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionError):  # closed in good order or reset: both are the end
            assert stranger.recv(1) == b""


def test_a_peer_that_takes_nothing_in_is_cut_off(
    two: tuple[TcpLinks, TcpLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = two
    monkeypatch.setattr(links_module, "OUTBOX_BYTES", 1 << 20)
    until(lambda: not one.send("other", FrameType.GROUP, bytes(1 << 20)))
    assert not one.is_up("other")
    assert isinstance(one.poll(0.0)[0], Lost)


def test_a_wake_ends_a_wait() -> None:
    links = TcpLinks("127.0.0.1")
    links.wake()
    started = time.monotonic()
    assert links.poll(5.0) == []
    assert time.monotonic() - started < 4
    links.close()
    links.wake()  # after the end: nothing


@pytest.mark.parametrize("address", ["", "host", ":5", "host:0", "host:70000", "host:x"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        split_address(address)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
def test_a_host_that_peers_cannot_reach_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        TcpLinks(host)


# --------------------------------------------------------------------------------------------- endpoints over sockets


class _Instant:
    """A write that is done."""

    def state(self) -> WriteState:
        return WriteState.DONE

    def release(self) -> None:
        pass


class InstantTransport:
    """Copies at once, within this process."""

    name, carries_notes = "instant", False

    def register(self, buffers: Sequence[LayerBuffer]) -> None:
        self._here = tuple(buffers)

    def metadata(self) -> bytes:
        return b""

    def connect(self, peer: str, metadata: bytes, buffers: Sequence[LayerBuffer]) -> None:
        self._there = tuple(buffers)

    def forget(self, peer: str) -> None:
        pass

    def post(self, peer: str, rows: Rows, note: bytes) -> _Instant:
        for at, here, there in rows:
            size = self._here[at].item_bytes
            for a, b in zip(here.tolist(), there.tolist(), strict=True):
                ctypes.memmove(self._there[at].addr + b * size, self._here[at].addr + a * size, size)
        return _Instant()

    def poll_notes(self) -> list[bytes]:
        return []

    def close(self) -> None:
        pass


Ends = tuple[PrefillEndpoint, DecodeEndpoint, str]


@pytest.fixture
def ends() -> Iterator[Ends]:
    memory = np.zeros((2, 4, 64), np.uint8)
    settings = PdSettings(drain_s=0.1)
    shapes = [Geometry((LayerBuffer("kv.0", 0, m.ctypes.data, 64, 4),), {}) for m in memory]
    prefill = PrefillEndpoint(shapes[0], InstantTransport(), settings)
    decode = DecodeEndpoint(shapes[1], InstantTransport(), settings)
    peer = decode.connect(prefill.address, 5.0)
    yield prefill, decode, peer
    decode.close()
    prefill.close()
    assert not memory[0].any()


def test_an_instance_can_be_asked_for_by_anybody(ends: Ends) -> None:
    prefill, decode, _ = ends
    assert instance_at(prefill.address, 5.0) == prefill.instance
    assert instance_at(decode.address, 5.0) == decode.instance
    assert prove_end(prefill.address, prefill.instance, lambda: True) is False
    assert prove_end(prefill.address, "another", lambda: True) is True


def test_nobody_and_no_answer_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert instance_at(address, 0.2) is None, "a machine that does not answer proves nothing"
    assert instance_at(address, 5.0) == "", "a refused connection does: nobody listens there"
    assert prove_end(address, "x", lambda: False) is None


def test_a_link_that_breaks_between_two_that_live(ends: Ends) -> None:
    """What was open fails; the decode side calls again, is told that nothing is in flight, and the next request works."""
    prefill, decode, peer = ends
    load = decode.start_load_kv(LoadRequest(peer, 1, np.array([2]), 30.0))
    until(lambda: prefill.reservations(1))
    links = decode._links
    assert isinstance(links, TcpLinks)
    links._links[peer].sock.shutdown(socket.SHUT_RDWR)
    until(lambda: load.status().state is LoadState.FAILED)
    assert "link" in load.status().reason
    assert load.release().wait(10.0)
    until(lambda: decode.is_connected(peer))
    assert decode.connect(prefill.address, 5.0) == peer
    again = decode.start_load_kv(LoadRequest(peer, 2, np.array([2]), 30.0))
    found = until(lambda: prefill.reservations(2))
    forward = prefill.start_save_kv([Chunk(found[0].key, 0, np.array([1]), is_last=True)])
    forward.finish()
    assert [s.state for s in forward.wait_for_save(10.0)] == [SendState.SENT]
    until(lambda: again.status().state is LoadState.COMPLETE)
    assert again.publish().tolist() == [2]
    prefill.forget(found[0].key)
    until(lambda: prefill.describe()["open_sends"] == decode.describe()["open_loads"] == 0)


def test_bytes_that_are_no_protocol_close_a_known_link(ends: Ends) -> None:
    prefill, decode, peer = ends
    load = decode.start_load_kv(LoadRequest(peer, 1, np.array([2]), 30.0))
    until(lambda: prefill.reservations(1))
    decode._call(lambda: decode._links.send(peer, FrameType.RESERVE, b"short") and None)
    until(lambda: load.status().state is LoadState.FAILED)
    assert load.release().wait(10.0)


def test_an_error_inside_a_round_ends_transfers_and_not_the_thread(ends: Ends) -> None:
    prefill, decode, peer = ends
    load = decode.start_load_kv(LoadRequest(peer, 1, np.array([2]), 30.0))
    until(lambda: prefill.reservations(1))

    def bug() -> None:
        raise RuntimeError("on purpose")

    prefill._call(bug)
    until(lambda: load.status().state is LoadState.FAILED)
    assert load.status().is_settled
    assert prefill.metrics.snapshot().counters["pd_errors"] == 1
    again = decode.start_load_kv(LoadRequest(peer, 2, np.array([2]), 30.0))
    until(lambda: prefill.reservations(2))
    again.release()


def test_a_frame_has_a_type_and_a_length() -> None:
    assert frame(FrameType.READY) == b"\x01\0\0\0\x03"
