"""Runs tests/kernel/interpreted in a child process: Triton reads TRITON_INTERPRET once, at import."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(marks: str, keyword: str, timeout_s: float | None) -> str:
    command = [sys.executable, "-m", "pytest", "tests/kernel/interpreted", "-q", "-p", "no:cacheprovider"]
    command += ["--durations=5", "-o", "addopts=--strict-markers --import-mode=importlib", "-m", marks, "-k", keyword]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_interpreted_suite_passes() -> None:
    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(run_interpreted, "not full", keyword, 580.0) for keyword in ("half0", "not half0")]
        for half in halves:
            last = half.result(timeout=590).strip().splitlines()[-1]
            assert "passed" in last and "skipped" not in last


@pytest.mark.full
@pytest.mark.timeout(0)
def test_the_interpreted_product_passes() -> None:
    """Every combination of features, every length with every split count; 35 to 100 minutes of two cores."""
    parts = [f"features{part:02d}" for part in range(31)] + [f"lengths{group:02d}" for group in range(1, 17)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for output in pool.map(lambda part: run_interpreted("full", part, None), parts):
            assert "1 passed" in output
