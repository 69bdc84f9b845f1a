"""Our prefetch pipeline behind the real UnifiedRadixCache, against SGLang's own pipeline over the same store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
POLICIES = ["best_effort", "timeout", "wait_complete", "deadline"]
TOKENS = 40 * 16

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def play(path: Path, cases: list[dict[str, Any]], **task: Any) -> Iterator[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(HERE.parent / "sglang_cpu" / "site"), "HF_HUB_OFFLINE": "1"}
    task |= {"path": str(path / "l3"), "cases": cases}
    ran = subprocess.run(
        [sys.executable, str(HERE / "pipeline_controller_child.py"), json.dumps(task)],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    for line in ran.stdout.splitlines():
        if line.startswith("CASE "):
            yield json.loads(line[5:])


def check_books(case: dict[str, Any]) -> None:
    assert case["right"], case
    assert case["ongoing"] == 0, case
    assert case["host_used"] == case["loaded"], case
    assert case["detached"] and case["dropped"], case
    if case["served"] == "extension":
        assert sum(case["outcomes"].values()) == 40, case


@pytest.mark.parametrize(
    "task",
    [{}, {"layout": "layer_first"}, {"mla": True}, {"mla": True, "layout": "layer_first"}],
    ids=["mha-page_first_direct", "mha-layer_first", "mla-page_first_direct", "mla-layer_first"],
)
def test_every_policy_loads_what_sglang_loads_with_the_same_bytes(tmp_path: Path, task: dict[str, Any]) -> None:
    cases = [{"pipeline": p, "policy": policy} for policy in POLICIES for p in ("sglang", "extension")]
    cases = [c for c in cases if c != {"pipeline": "sglang", "policy": "deadline"}]
    results = list(play(tmp_path, cases, **task))
    assert [r["served"] for r in results] == [c["pipeline"] for c in cases]
    for result in results:
        check_books(result)
    hits = {(r["policy"], r["served"]): r["loaded"] for r in results}
    for policy in POLICIES[:3]:
        assert hits[policy, "extension"] >= hits[policy, "sglang"]
    assert hits["deadline", "extension"] == TOKENS


def test_over_a_faulty_store_what_is_loaded_is_right_and_the_books_close(tmp_path: Path) -> None:
    plans = [
        {"seed": 1, "read_error": 0.05},
        {"seed": 2, "bit_flip": 0.05},
        {"seed": 3, "call_error": 0.3},
        {"seed": 4, "late": 0.1, "late_s": 0.05},
        {"seed": 5, "latency_s": [0.0, 0.05]},
        {"seed": 6, "dead_after_calls": 3},
    ]
    cases = [{"pipeline": "extension", "policy": p, "faults": f} for f in plans for p in ("wait_complete", "timeout")]
    results = list(play(tmp_path, cases))
    assert len(results) == len(cases)
    for result in results:
        check_books(result)
    struck = [r for r in results if r["loaded"] < TOKENS]
    assert struck, "no fault ever struck"


def test_abort_and_flush_leave_nothing_behind(tmp_path: Path) -> None:
    cases = [
        {"pipeline": "extension", "policy": "wait_complete", "abort": True},
        {"pipeline": "extension", "policy": "wait_complete", "flush": True},
    ]
    aborted, flushed = play(tmp_path, cases)
    check_books(aborted)
    check_books(flushed)
    assert (aborted["loaded"], flushed["loaded"]) == (0, TOKENS)
    assert flushed["after_flush"] == [True, True]


def test_without_the_option_nothing_of_sglang_is_touched(tmp_path: Path) -> None:
    (result,) = play(tmp_path, [{"pipeline": "sglang", "policy": "timeout"}])
    assert result["hooked"] == []
