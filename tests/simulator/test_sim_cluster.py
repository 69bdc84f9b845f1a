"""The cluster model: bounds, tiers, calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulator.calibrate import DRIVE_CASES, with_drive, with_network
from simulator.cluster import ClusterSpec, copies, simulate_cluster
from simulator.engine import simulate
from simulator.loads import SharedPrompt
from simulator.spec import NodeSpec
from storage_bench.shape import Case

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.testing.latency import Constant

LOAD = SharedPrompt(requests=80).load()


def median(values: list[float]) -> float:
    return float(np.median(values))


def test_one_node_with_one_drive_is_the_single_node_simulator() -> None:
    node = NodeSpec()
    spec = ClusterSpec(nodes=1, node=node, drives=1, drive_read_Bps=node.l3_read_Bps, drive_delay_s=0.002, nic_Bps=0)
    alone = simulate(LOAD, node, Constant(base_s=0.002), "wait_complete")
    assert simulate_cluster(LOAD, spec, "wait_complete").ttft_s == pytest.approx(
        [alone.ttft_s[i] for i in range(len(LOAD.requests))]
    )


def test_more_network_and_more_drives_never_hurt_much() -> None:
    load = copies(LOAD, 2)
    slow = simulate_cluster(load, ClusterSpec(nodes=2, drives=0, nic_Bps=1e9), "deadline")
    fast = simulate_cluster(load, ClusterSpec(nodes=2, drives=0, nic_Bps=50e9), "deadline")
    none = simulate_cluster(load, ClusterSpec(nodes=2, drives=0, nic_Bps=0), "deadline")
    assert median(fast.ttft_s) < median(slow.ttft_s) <= median(none.ttft_s) * 1.05
    assert none.network_bytes == none.drive_bytes == 0


def test_a_page_read_from_the_remote_tier_is_read_from_the_drive_afterwards() -> None:
    again = replace(LOAD, requests=tuple(replace(r, arrival_s=i * 5.0) for i, r in enumerate(LOAD.requests * 2)))
    node = NodeSpec(l1_tokens=1024, l2_tokens=40_000)
    found = simulate_cluster(again, ClusterSpec(nodes=1, node=node, drives=1), "wait_complete")
    assert found.network_bytes > 0
    assert found.drive_bytes > found.network_bytes


def test_the_remote_tier_is_a_limit_of_its_own() -> None:
    load = copies(LOAD.head(30), 4, shift_s=0.0)
    wide = ClusterSpec(nodes=4, drives=0, nic_Bps=12.5e9, remote_Bps=100e9)
    a, b = (simulate_cluster(load, s, "wait_complete") for s in (wide, replace(wide, remote_Bps=4e9)))
    assert median(b.ttft_s) > 1.2 * median(a.ttft_s)


def test_copies_share_no_page() -> None:
    two = copies(LOAD, 2)
    assert len(two.requests) == 2 * len(LOAD.requests)
    assert len({p for r in two.requests for p in r.pages}) == 2 * len({p for r in LOAD.requests for p in r.pages})


def test_measured_bandwidths_replace_the_defaults(tmp_path: Path) -> None:
    row = {"case": "read 256k sequential 1t", "arm": "ours-io_uring", "metrics": {"gb_s": {"p50": 2.5}}}
    drive = {"benchmark": "bench_storage", "extra": {"headline_arm": "ours-io_uring"}, "table": [row]}
    (tmp_path / "d.json").write_text(json.dumps(drive))
    spec, words = with_drive(ClusterSpec(), str(tmp_path / "d.json"))
    assert spec.drive_read_Bps == 2.5e9
    assert spec.drive_write_Bps == ClusterSpec().drive_write_Bps
    assert "2.50 GB/s" in words[0]
    remote = {"benchmark": "bench_remote", "table": [{"case": "x", "arm": "ours", "metrics": {"gb_s": {"p50": 1.5}}}]}
    (tmp_path / "n.json").write_text(json.dumps(remote))
    assert with_network(ClusterSpec(), str(tmp_path / "n.json"))[0].nic_Bps == 1.5e9


def test_the_cases_it_is_calibrated_by_are_those_that_bench_storage_measures() -> None:
    made = {Case(direction, 256 << 10, "sequential", 1, 1 << 20).name for direction in ("read", "write")}
    assert set(DRIVE_CASES.values()) == made


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "other"}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(ConfigError, match="bench_storage"):
        with_drive(ClusterSpec(), str(tmp_path / "d.json"))
