"""Real transfers between two processes, and what is left when one of them dies or hangs."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.testing.pd_process import Shape, StampedPool

pytest.importorskip("nixl")

SLOTS = 64
FULL = pytest.mark.full


def test_two_thousand_transfers_through_64_slots(pair: Callable[..., Any]) -> None:
    prefill, decode = pair({"abort_rate": 0.03, "seed": 5})
    decode.do(do="storm", count=2000, abort_rate=0.15)
    result = decode.hear("storm", timeout_s=110)
    assert result["started"] == 2000 and result["open"] == 0
    assert result["foreign"] == result["dirty"] == 0
    assert result["complete"] > 1000 and result["ended"] > 100
    assert result["complete"] + result["ended"] == 2000
    assert result["free"] == SLOTS
    time.sleep(0.2)
    prefill.do()
    left = prefill.hear("ok")
    assert (left["dirty"], left["free"], left["open"]) == (0, SLOTS, 0)
    assert decode.leave() == 0
    assert prefill.leave() == 0


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_pair_sleeps(pair: Callable[..., Any]) -> None:
    """A thread that spins would take a second a second, or what a busy machine leaves of it."""
    sides = pair()
    time.sleep(0.3)
    before = [cpu_seconds(side.process.pid) for side in sides]
    time.sleep(1.5)
    used = [cpu_seconds(side.process.pid) - b for side, b in zip(sides, before, strict=True)]
    assert max(used) < 0.5


@FULL
def test_the_transports_that_ucx_chooses_by_itself(pair: Callable[..., Any]) -> None:
    """Shared memory on one machine, RDMA between two that have it."""
    _, decode = pair({"abort_rate": 0.03}, settings={"pd_ucx": ""})
    decode.do(do="storm", count=300, abort_rate=0.15)
    result = decode.hear("storm", timeout_s=60)
    assert (result["foreign"], result["dirty"], result["free"]) == (0, 0, SLOTS)
    assert result["complete"] > 150


def test_mooncake_transfers_through_64_slots(pair: Callable[..., Any]) -> None:
    _, decode = pair({"abort_rate": 0.03}, settings={"pd_transport": "mooncake"})
    decode.do(do="storm", count=100, abort_rate=0.15)
    result = decode.hear("storm", timeout_s=60)
    assert (result["foreign"], result["dirty"], result["free"]) == (0, 0, SLOTS)
    assert result["complete"] > 50


@pytest.mark.parametrize("code", [pytest.param(0, marks=FULL), 3])
def test_a_process_that_used_nixl_ends_with_its_own_exit_code(pair: Callable[..., Any], code: int) -> None:
    prefill, decode = pair({"exit": code}, {"exit": code})
    decode.do(do="load", room=1, pages=3, deadline_s=10)
    assert decode.hear("load")["state"] == "complete"
    assert (prefill.leave(), decode.leave()) == (code, code)


@pytest.mark.parametrize("hold", [pytest.param("reserved", marks=FULL), "layer", pytest.param("finished", marks=FULL)])
def test_prefill_dies(pair: Callable[..., Any], start: Callable[..., Any], hold: str) -> None:
    prefill, decode = pair({"hold": hold})
    if hold != "finished":
        decode.do(do="load", room=1, pages=5, deadline_s=60)
        prefill.hear("held")
        prefill.kill()
        over = decode.hear("load", timeout_s=10)
        assert over["state"] == "failed" and "prefill side" in over["reason"]
    else:
        decode.do(do="load", room=1, pages=5, deadline_s=60)
        assert decode.hear("load", timeout_s=10)["foreign"] == 0
        prefill.kill()
    decode.state_until(free=SLOTS, quarantined=0, dirty=0)
    another = start("prefill")
    decode.do(do="connect", address=another.hear("up")["address"])
    decode.hear("connected")
    decode.do(do="load", room=2, pages=5, deadline_s=20)
    over = decode.hear("load", room=2)
    assert (over["state"], over["foreign"]) == ("complete", 0)


@pytest.mark.parametrize(
    ("hold", "transport"),
    [pytest.param("reserved", "nixl", marks=FULL), ("layer", "nixl"), pytest.param("layer", "mooncake", marks=FULL)],
)
def test_decode_dies(pair: Callable[..., Any], start: Callable[..., Any], hold: str, transport: str) -> None:
    settings = {"pd_transport": transport}
    prefill, decode = pair({"hold": hold}, settings=settings)
    decode.do(do="load", room=1, pages=5, deadline_s=60)
    prefill.hear("held")
    decode.kill()
    over = prefill.hear("sent", timeout_s=10)
    assert over["state"] == "failed" and "decode side" in over["reason"]
    prefill.do(hold="")
    prefill.hear("ok")
    another = start("decode", settings)
    another.hear("up")
    another.do(do="connect", address=_address(prefill))
    another.hear("connected")
    another.do(do="load", room=2, pages=5, deadline_s=20)
    over = another.hear("load", room=2)
    assert (over["state"], over["foreign"]) == ("complete", 0)
    time.sleep(0.1)
    prefill.do(hold="")
    assert prefill.hear("ok")["free"] == SLOTS


def _address(prefill: Any) -> str:
    prefill.do()
    return str(prefill.hear("ok")["address"])


LARGE = {"shape": {"layers": 4, "slots": 64, "page_words": 32768}}
"""256 KiB a page and half: far more than the sockets between the two hold."""


def test_prefill_hangs_and_comes_back(pair: Callable[..., Any]) -> None:
    """SIGSTOP in the middle, deadline, SIGCONT: what arrives late arrives in pages that nobody has been given."""
    prefill, decode = pair(LARGE, LARGE)
    firsts = StampedPool(decode.memory, Shape(**LARGE["shape"]), is_new=False).pages[..., 0]
    decode.do(do="load", room=1, pages=40, deadline_s=1.5)
    deadline = time.monotonic() + 10
    while not (firsts != -1).any():
        assert time.monotonic() < deadline
    prefill.signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert np.count_nonzero(firsts != -1) < 4 * 2 * 40, "stopped in the middle of its writes"
    over = decode.hear("load", timeout_s=10)
    assert over["state"] == "timed_out"
    state = decode.state_until(quarantined=40)
    assert state["free"] == SLOTS - 40
    time.sleep(0.5)
    decode.state_until(quarantined=40)  # no timer gives them back
    prefill.signal(signal.SIGCONT)
    decode.state_until(free=SLOTS, quarantined=0)
    decode.do(do="load", room=2, pages=60, deadline_s=20)  # takes the same pages; says if one is dirty
    over = decode.hear("load", room=2)
    assert (over["state"], over["foreign"]) == ("complete", 0)
    decode.state_until(dirty=0, free=SLOTS)


def test_decode_hangs_and_comes_back(pair: Callable[..., Any]) -> None:
    """The sender's pages are not used again while a stopped peer may still have them read."""
    prefill, decode = pair({"layer_s": 0.1, **LARGE}, LARGE, settings={"pd_deadline_s": 1.0})
    firsts = StampedPool(decode.memory, Shape(**LARGE["shape"]), is_new=False).pages[..., 0]
    decode.do(do="load", room=1, pages=60, deadline_s=20)
    deadline = time.monotonic() + 10
    while not (firsts != -1).any():
        assert time.monotonic() < deadline
    decode.signal(signal.SIGSTOP)
    over = prefill.hear("sent", timeout_s=10)
    assert over["state"] == "failed" and "deadline" in over["reason"]
    time.sleep(0.5)
    prefill.do()
    assert prefill.hear("ok")["free"] == SLOTS - 60, "the driver may still read them"
    decode.signal(signal.SIGCONT)
    assert decode.hear("load", room=1)["state"] == "failed"
    decode.state_until(free=SLOTS, quarantined=0)
    prefill.do(layer_s=0.0)
    assert prefill.hear("ok")["free"] == SLOTS
    decode.do(do="load", room=2, pages=60, deadline_s=20)
    over = decode.hear("load", room=2)
    assert (over["state"], over["foreign"]) == ("complete", 0)
    decode.state_until(dirty=0, free=SLOTS)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("other", "settings", "words"),
    [
        ({"shape": {"layers": 5}}, {}, "layers: here 6, peer 5"),
        pytest.param({"shape": {"page_words": 256}}, {}, "item_bytes: here 2048, peer 4096", marks=FULL),
        pytest.param({"facts": {"dtype": "float8_e4m3"}}, {}, "dtype: here 'float8_e4m3', peer 'int64'", marks=FULL),
        ({"facts": {"sglang": "0.5.22"}}, {}, "sglang: here '0.5.22', peer 'not given'"),
        pytest.param({}, {"pd_transport": "mooncake"}, "transport: here 'mooncake', peer 'nixl'", marks=FULL),
    ],
)
def test_sides_that_do_not_fit(
    start: Callable[..., Any], other: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    prefill, decode = start("prefill"), start("decode", settings, **other)
    decode.do(do="connect", address=prefill.hear("up")["address"])
    assert words in decode.hear("refused")["error"]


def test_a_decode_address_in_place_of_a_prefill_one(start: Callable[..., Any]) -> None:
    one, other = start("decode"), start("decode")
    other.do(do="connect", address=one.hear("up")["address"])
    assert "role: here 'decode', peer 'decode'" in other.hear("refused")["error"]


def test_an_address_where_nobody_answers(start: Callable[..., Any]) -> None:
    decode = start("decode")
    decode.do(do="connect", address="127.0.0.1:1", timeout_s=2)
    assert "no prefill endpoint answers" in decode.hear("refused")["error"]
    decode.do(do="connect", address="localhost", timeout_s=2)
    assert "'localhost' is no address" in decode.hear("refused")["error"]


def test_a_server_that_is_none_of_ours(start: Callable[..., Any]) -> None:
    decode = start("decode")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            conn, _ = server.accept()
            with conn:
                conn.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                time.sleep(0.5)

        threading.Thread(target=greet, daemon=True).start()
        decode.do(do="connect", address=f"127.0.0.1:{server.getsockname()[1]}", timeout_s=5)
        assert "no PD endpoint of this protocol" in decode.hear("refused")["error"]


def test_a_load_whose_prefill_never_comes(pair: Callable[..., Any]) -> None:
    """A wrong room: nobody at the prefill side knows it. The deadline ends it and its pages come back."""
    _, decode = pair({"hold": "reserved"})
    decode.do(do="load", room=404, pages=3, deadline_s=0.5)
    assert decode.hear("load", room=404)["state"] == "timed_out"
    decode.state_until(free=SLOTS, quarantined=0)


def test_stamps_tell_foreign_pages(tmp_path: Path) -> None:
    """The check that all of the above rely on."""
    pool = StampedPool(str(tmp_path / "pool"), Shape(2, 8, 16))
    for layer in range(2):
        for at, slot in enumerate((3, 5)):
            pool.stamp(7, layer, slot, at)
    pool.extra[3] = 7
    assert pool.foreign(7, [3, 5]) == 0
    assert pool.foreign(7, [5, 3]) > 0
    assert pool.foreign(8, [3, 5]) > 0
    pool.pages[1, 1, 5, 15] += 1
    assert pool.foreign(7, [3, 5]) == 1
    assert pool.dirty([3, 5]) > 0 and pool.dirty([0, 1]) == 0
    assert np.count_nonzero(pool.pages == -1) > 0
