"""The documented example runs as it stands."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_the_example_runs(transport: str) -> None:
    pytest.importorskip(transport)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_hicache_ext.pd.example", transport],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every byte is right" in done.stdout
    assert "layer 0: landed True" in done.stdout
    assert "32 pages, draft tokens allowed 4" in done.stdout
