"""A prefill and a decode process with stamped memory, driven line by line."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Child:
    """One side. Every wait has a deadline; the process is killed at the end of the test."""

    def __init__(self, role: str, folder: Path, **options: Any) -> None:
        self.memory = str(folder / f"hicache-ext-pd-{uuid.uuid4().hex}")
        self.options = {"role": role, "memory": self.memory, **options}
        self._log = (folder / f"{role}-{uuid.uuid4().hex[:6]}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang_hicache_ext.testing.pd_process", json.dumps(self.options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))

    def do(self, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self, event: str, timeout_s: float = 30.0, **wanted: Any) -> dict[str, Any]:
        """The next line of that event (others are skipped)."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                words = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if words["event"] == event and all(words.get(k) == v for k, v in wanted.items()):
                return words
        raise AssertionError(f"{self.options['role']} did not say {event} {wanted}; its log:\n{self.log()}")

    def state_until(self, timeout_s: float = 15.0, **wanted: Any) -> dict[str, Any]:
        """Ask a decode process for its state until it is as wanted."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.do(do="state")
            state = self.hear("state")
            if all(state[k] == v for k, v in wanted.items()):
                return state
            assert time.monotonic() < deadline, f"{state} instead of {wanted}"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def leave(self, timeout_s: float = 20.0) -> int:
        """End it in good order; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout_s)

    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()[-4000:]

    def clean(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self._log):
            if stream is not None:
                stream.close()
        Path(self.memory).unlink(missing_ok=True)


Pair = tuple[Child, Child]
SETTINGS = {"pd_group": 1, "pd_layered_min": 0, "pd_drain_s": 0.3, "pd_ucx": "TLS=tcp"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Start a side: ``start("prefill", settings={...}, hold="layer", ...)``."""
    children: list[Child] = []

    def begin(role: str, settings: dict[str, Any] | None = None, **options: Any) -> Child:
        children.append(Child(role, tmp_path, settings={**SETTINGS, **(settings or {})}, **options))
        return children[-1]

    yield begin
    for child in children:
        child.clean()


@pytest.fixture
def pair(start: Callable[..., Child]) -> Callable[..., Pair]:
    """Start both sides and connect them: ``pair(prefill={...}, decode={...}, settings={...})``."""

    def begin(
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Pair:
        sides = start("prefill", settings, **(prefill or {})), start("decode", settings, **(decode or {}))
        sides[1].do(do="connect", address=sides[0].hear("up")["address"])
        sides[1].hear("connected")
        return sides

    return begin
