"""bench_pd: bad input, its arithmetic, and a short run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import bench_pd
import numpy as np
import pytest
from harness import EXIT_BAD_INPUT, EXIT_OK, entry
from pd_bench.shape import KvMemory, ModelShape

from sglang_hicache_ext.pd.geometry import LayerBuffer
from sglang_hicache_ext.pd.transport import WriteState
from sglang_hicache_ext.testing.clock import ManualClock
from sglang_hicache_ext.testing.pd_link import ThrottledTransport
from sglang_hicache_ext.testing.pd_sim import SimNet, SimTransport


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "many"], "write numbers of tokens"),
        (["--lengths", "0"], "from 1 to"),
        (["--lengths", "1048576"], "MiB on both sides"),
        (["--forward", "100"], "whole pages"),
        (["--link", "1MB"], "slower than the computing"),
        (["--group", "much"], "--group is not a size"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert entry(bench_pd.main, arguments) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_stamps_find_a_wrong_page() -> None:
    memory = KvMemory(ModelShape(layers=2, kv_heads=1, head_dim=8), 128)
    slots = np.array([2, 0])
    memory.fill(slots, 9)
    assert memory.wrong_pages(slots, 9) == 0
    assert memory.wrong_pages(slots[::-1], 9) > 0
    memory.pages[1, 0, 2, 3] ^= 1
    assert memory.wrong_pages(slots, 9) == 1


def test_the_emulated_link_carries_one_write_after_the_other() -> None:
    clock = ManualClock(0.0)
    net = SimNet(1, clock)
    memory = np.zeros((2, 4, 100), np.uint8)
    sides = [(LayerBuffer("k", 0, m.ctypes.data, 100, 4),) for m in memory]
    link = ThrottledTransport(SimTransport(net, "p"), 100.0, clock.now)
    link.register(sides[0])
    link.connect("d", b"", sides[1])
    one, two = (link.post("d", [(0, np.array([i]), np.array([i]))], b"n") for i in (0, 1))
    states = []
    for _ in range(50):
        clock.advance(0.05)
        net.tick()
        states.append((one.state(), two.state()))
    done = [[s[i] for s in states].index(WriteState.DONE) for i in (0, 1)]
    assert done == [19, 39], "a second each, one after the other"
    assert net.node("d").notes.count(b"n") == 0, "the endpoint sends the note, when the link would have"


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    pytest.importorskip("nixl")
    out = tmp_path / "pd.json"
    code = entry(bench_pd.main, ["--smoke", "--json", str(out)])
    found = json.loads(out.read_text())
    assert code == EXIT_OK, found["failures"]
    assert {"visible_vs_bound_slow_link", "short_vs_whole_request"} <= set(found["summary"])
    assert found["extra"]["endpoints"]["prefill"]["counters"]["pd_chunks_layered"] > 0
