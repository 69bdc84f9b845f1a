"""The benchmark without a GPU: floors, and how it turns measurements into the planner's table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.kernels.l2_prefetch.planner import Shape, make_plan
from sglang_hicache_ext.kernels.l2_prefetch.tuning import load_table

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_l2_prefetch.py"
H200 = load_table().gpus["NVIDIA H200"]


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_l2_prefetch", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_l2_prefetch"] = module
    spec.loader.exec_module(module)
    return module


def test_the_floor_is_bytes_over_bandwidth(bench: Any) -> None:
    assert bench.kv_bytes("llama-2-7b", 16, 4096) == 16 * 4096 * 2 * 32 * 128 * 2
    assert bench.floor_s("llama-2-7b", 16, 4096, 3.35e12) * 1e6 == pytest.approx(320.8, abs=0.1)
    assert bench.floor_s("qwen2.5-7b", 16, 4096, 4.3e12) * 1e6 == pytest.approx(31.4, abs=0.1)


@pytest.mark.slow
def test_on_a_machine_without_a_gpu_the_script_prints_the_floors(tmp_path: Path, bench: Any) -> None:
    out = tmp_path / "r.json"
    command = [sys.executable, str(SCRIPT), "--roofline", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    assert "nothing here is measured" in done.stdout and "No GPU" in done.stdout
    assert len(json.loads(out.read_text())["roofline"]) == len(bench.SHAPES)


def rows(bench: Any, prefetch_us: float, slow_shape_us: float = 0.0, noise: float = 0.002) -> list[dict[str, Any]]:
    """Measurements of one tile: 100 us without prefetch, ``prefetch_us`` with."""
    out = []
    for model, batch, context in bench.SHAPES:
        for form, distance, us in (("none", 0, 100.0), ("line", 2, prefetch_us)):
            slow = form == "line" and slow_shape_us and (batch, context) == (1, 4096)
            time_us = slow_shape_us if slow else us
            row = {"model": model, "batch": batch, "context": context, "arm": "ours", "error": 1e-3}
            row |= {"block": 32, "stages": 3, "form": form, "distance": distance, "pdl": False}
            out.append(row | {"us": time_us, "us_again": time_us * (1 + noise)})
    return out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_prefetch_enters_the_table_only_when_it_gains_more_than_the_noise_and_costs_no_shape(bench: Any) -> None:
    wins = bench.choose_rows(rows(bench, 90.0), H200, "test")
    assert [(t.form, t.distance) for t in wins] == [("line", 2)] * 3
    assert wins[0].gain_percent == pytest.approx(11.1, abs=0.1) and 0 < wins[0].registers <= 128
    for measured in (
        rows(bench, 99.0),
        rows(bench, 95.0, noise=0.04),
        rows(bench, 90.0, slow_shape_us=101.0)[:6],
    ):
        assert all((t.form, t.distance) == ("none", 0) for t in bench.choose_rows(measured, H200, "test"))
    table = load_table().with_rows(H200, wins)
    plan = make_plan(H200, Shape(32, 32, 128, "bf16"), [4096] * 2, table=table)
    assert plan.tile.measured == "test; noise 0.2 %" and plan.prefetch.distance == 2, plan.why


def test_wrong_results_never_enter_the_table(bench: Any) -> None:
    bad = [r | {"error": 1.0} for r in rows(bench, 90.0)]
    assert bench.choose_rows(bad, H200, "test") == []
