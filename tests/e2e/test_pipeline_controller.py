"""Our prefetch pipeline behind the real UnifiedRadixCache, against SGLang's own pipeline over the same store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
POLICIES = ["best_effort", "timeout", "wait_complete", "deadline"]
TOKENS = 40 * 16
LIMIT_S = 400
"""Seconds for one run; generous, because a busy machine takes minutes for what an idle one does in thirty seconds."""

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def play(path: Path, cases: list[dict[str, Any]], ranks: int = 1, **task: Any) -> list[dict[str, Any]]:
    """Results of rank 0; the other ranks must have found the same."""
    task |= {"path": str(path / "l3"), "cases": cases, "ranks": ranks}
    env = {**os.environ, "PYTHONPATH": str(HERE.parent / "sglang_cpu" / "site"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "pipeline_controller_child.py"), json.dumps(task)]
    logs = [path / f"rank{i}.log" for i in range(ranks)]
    children = []
    for i, log in enumerate(logs):
        with log.open("w") as out:
            child = subprocess.Popen(command, env={**env, "RANK": str(i)}, stdout=out, stderr=subprocess.STDOUT)
            children.append(child)
    try:
        codes = [child.wait(LIMIT_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait(30)
    texts = [log.read_text(errors="replace") for log in logs]
    assert codes == [0] * ranks, texts[0][-3000:]
    found = [[json.loads(line[5:]) for line in text.splitlines() if line.startswith("CASE ")] for text in texts]
    assert all(same(other, found[0]) for other in found[1:])
    return found[0]


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Equal but for why pages were not loaded, which each rank sees for itself."""
    return [{k: v for k, v in c.items() if k != "outcomes"} for c in one] == [
        {k: v for k, v in c.items() if k != "outcomes"} for c in other
    ]


def check_books(case: dict[str, Any]) -> None:
    assert case["right"], case
    assert case["ongoing"] == 0, case
    assert case["host_used"] == case["loaded"], case
    assert case["dropped"], case
    if case["served"] == "extension":  # SGLang's own detach refuses while its threads are still at it
        assert case["detached"], case
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


def test_two_ranks_agree_under_every_policy_and_over_a_store_that_fails_on_one(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{"pipeline": "extension", "policy": policy} for policy in POLICIES]
    cases.append(
        {
            "pipeline": "extension",
            "policy": "wait_complete",
            "faulty_rank": 1,
            "faults": {"seed": 1, "read_error": 0.05},
        }
    )
    results = play(tmp_path, cases, ranks=2)
    for result in results:
        check_books(result)
    assert [r["loaded"] for r in results[1:4]] == [TOKENS] * 3
    assert 0 <= results[4]["loaded"] < TOKENS


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
