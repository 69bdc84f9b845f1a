"""verify, gc and inspect while two servers read and write the same directory: no lost page, no wrong page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.cli.offline import NICE, Pace
from sglang_hicache_ext.testing.load import Load

PAGE_BYTES = 65_536
SECONDS = 6.0


def tool(*args: object) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "sglang_hicache_ext.cli.main", *map(str, args), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(tmp_path / "kv"), "capacity": "1GiB", "engine": "posix"}


@pytest.fixture
def servers(config: dict[str, Any]) -> Iterator[list[Load]]:
    old = Load(config, "old-model", PAGE_BYTES, 320)
    old.ask("run 0.3")
    old.answer()
    old.close()
    running = [Load(config, f"server-{i}", PAGE_BYTES, 2048) for i in range(2)]
    yield running
    for server in running:
        server.close()


@pytest.mark.slow
def test_servers_lose_nothing_while_tools_work(servers: list[Load], config: dict[str, Any]) -> None:
    path = config["path"]
    for server in servers:
        server.ask(f"run {SECONDS}")
    code, seen = tool("inspect", path)
    assert code == 0
    old_pages = sum(n["pages"] for n in seen["namespaces"] if n["fingerprint"]["model"] == "old-model")
    code, checked = tool("verify", path)
    assert (code, set(checked["outcomes"])) == (0, {"loaded"})
    code, gone = tool("gc", path, "--namespace", "old-model", "--apply")
    assert (code, gone["removed_pages"]) == (0, old_pages)
    assert tool("gc", path, "--older-than", "1h", "--apply")[1]["removed_pages"] == 0
    code, checked = tool("verify", path, "--sample", "0.5")
    assert (code, set(checked["outcomes"])) == (0, {"loaded"})
    for server in servers:
        server.answer()
        server.ask("check")
        counted = server.answer()
        assert (counted["wrong"], counted["lost"], counted["refused"]) == (0, 0, 0), counted
        assert counted["written"] > 100
        assert sum(counted["outcomes"].values()) == counted["queried"]
    assert old_pages > 0
    left = tool("inspect", path)[1]
    assert sum(n["pages"] for n in left["namespaces"] if n["fingerprint"]["model"] == "old-model") == 0


@pytest.mark.slow
def test_what_goes_through_a_store_steps_back_and_what_measures_does_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; from sglang_hicache_ext.cli import main as m\n"
        "m.app = lambda: print(os.nice(0), open('/proc/self/stat').read().split()[18])\n"
        "sys.argv = ['hicache-ext', sys.argv[1]]; m.main()"
    )

    def niceness(verb: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", code, verb], capture_output=True, text=True, timeout=60, check=True
        )
        return int(done.stdout.split()[0])

    own = os.nice(0)
    assert niceness("verify") == min(19, own + NICE)
    assert niceness("bench") == own


def test_a_pace_holds_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    pace = Pace(1000)
    pace.spend(500)
    pace.spend(500)
    assert slept == [0.5, 1.0]
    Pace(0).spend(1 << 40)
    assert len(slept) == 2
