"""The scripts: exit codes, columns, and the comparison of rankings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cluster_model
import compare_policies
import pytest
from harness import entry
from policy_bench import ranking, real
from policy_bench.simulated import COLUMNS, STORES

from sglang_hicache_ext.testing.latency import latency_model


def test_a_smoke_run_gives_every_policy_and_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    code = entry(
        compare_policies.main, ["--smoke", "--stores", "constant", "--loads", "multi_turn", "--json", str(out)]
    )
    found = json.loads(out.read_text())
    assert code == 0
    assert {s["arm"] for s in found["samples"]} == {"no_l3", "best_effort", "timeout", "wait_complete", "deadline"}
    assert all(set(COLUMNS) <= set(s["values"]) for s in found["samples"])
    assert found["summary"]["deadline_vs_best_max"] > 0
    assert "break-even" in capsys.readouterr().out


def trace(path: Path) -> Path:
    rows = [
        {
            "timestamp": i * 900,
            "input_length": 512 * n,
            "output_length": 1,
            "hash_ids": [0, *range(10 * i, 10 * i + n - 1)],
        }
        for i, n in enumerate((5, 9, 3, 9, 5) * 4, 1)
    ]
    file = path / "t.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_the_hit_rate_of_a_trace_is_checked_against_a_count(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    options = ["--loads", "", "--stores", "constant", "--trace", str(trace(tmp_path)), "--json", str(out)]
    assert entry(compare_policies.main, options) == 0
    found = json.loads(out.read_text())
    assert found["summary"]["hit_rate_infinite"] == pytest.approx(19 / 124)
    assert "sha256:" in found["extra"]["loads"]["t"]


BAD_ARGUMENTS = {
    "no such trace": (compare_policies, ["--trace", "/nonexistent/trace"], "cannot read the trace"),
    "unknown store": (compare_policies, ["--stores", "slow"], "--stores: slow"),
    "unknown policy": (compare_policies, ["--policies", "hope"], "--policies: hope"),
    "no bandwidth": (compare_policies, ["--l3-gb-s", "-1"], "l3_read_Bps is -1"),
    "drives are text": (cluster_model, ["--drives", "many"], "--drives is 'many'"),
    "no result": (cluster_model, ["--smoke", "--drive", "/nonexistent.json"], "bench_storage"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_end_in_one_line_and_code_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, arguments, message = BAD_ARGUMENTS[name]
    assert entry(script.main, arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


GOOD_LINE = '{"timestamp": 5, "input_length": 10, "output_length": 1, "hash_ids": [1]}'
BAD_TRACES = {
    "empty": ("", "the trace is empty"),
    "a field is missing": ('{"timestamp": 1}', "line 1, field 'input_length'"),
    "goes back in time": (f"{GOOD_LINE}\n{GOOD_LINE.replace('5', '4', 1)}", "line 2, field 'timestamp'"),
    "negative length": (GOOD_LINE.replace("10", "-10", 1), "input_length is negative"),
}


@pytest.mark.parametrize("script", [compare_policies, cluster_model], ids=lambda s: s.__name__)
@pytest.mark.parametrize("name", BAD_TRACES)
def test_a_bad_trace_ends_in_one_line_and_code_2(
    name: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BAD_TRACES[name]
    (tmp_path / "bad.jsonl").write_text(text)
    assert entry(script.main, ["--trace", str(tmp_path / "bad.jsonl")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_every_store_model_of_the_simulation_can_slow_the_real_engine() -> None:
    machine = real.Machine(tokens_per_s=4096.0, overhead_s=0.0, hit_s=0.001, kv_bytes_per_token=1000)
    slow = {store: latency_model(real._control(store, machine, 3)["model"]) for store in STORES}
    assert {store: model.kind for store, model in slow.items()} == {store: store for store in STORES}
    times = [machine.batch_s * t / 10 for t in range(200)]
    waits = [slow["stall"].delay_s(0, t) for t in times]
    assert max(waits) > 1.5 * machine.batch_s and min(waits) == pytest.approx(0.1 * machine.batch_s)
    slowed_rate = real._control("shared_bandwidth", machine, 3)["bandwidth_Bps"] * min(
        slow["shared_bandwidth"].share(t) for t in times
    )
    assert slowed_rate < machine.tokens_per_s * machine.kv_bytes_per_token


def test_the_cluster_model_answers_with_drives_and_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    options = ["--smoke", "--nodes", "2", "--drives", "0,2", "--nics-gbit", "0,400", "--json", str(out)]
    assert entry(cluster_model.main, options) == 0
    assert "drives with" in capsys.readouterr().out
    assert json.loads(out.read_text())["summary"]["gbit_for_ttft_p50_s"] in (0.0, 400.0)


FAST, SLOW = [1.0, 1.1, 0.9, 1.0] * 5, [2.0, 2.2, 1.9, 2.0] * 5


def test_equal_rankings_agree_and_opposite_ones_do_not() -> None:
    assert ranking.compare({"a": FAST, "b": SLOW}, {"a": FAST, "b": SLOW}).share == 1.0
    found = ranking.compare({"a": FAST, "b": SLOW}, {"a": SLOW, "b": FAST})
    assert found.share == 0.0
    assert any("ranked differently" in line for line in found.lines)


def test_a_difference_that_may_be_chance_says_nothing() -> None:
    assert ranking.compare({"a": FAST, "b": FAST}, {"a": SLOW, "b": FAST}).share is None
