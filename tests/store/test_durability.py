"""Read-after-write between processes: the handle says durable when, and only when, another process can read the bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_hicache_ext.cli.main import app
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.durability import DurablePrefix
from sglang_hicache_ext.keys import Fingerprint, hash_chain, key_bytes
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.memory import MemoryStore
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

PAGE_TOKENS, PAGE_BYTES, PAGES = 16, 16_384, 12
PRINT = Fingerprint(model="durable", page_tokens=PAGE_TOKENS)
TOKENS = list(range(PAGE_TOKENS * PAGES))
KEYS = [key_bytes(k) for k in hash_chain(TOKENS, PAGE_TOKENS)]


def payload() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(9).integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)


def open_store(path: Path, durability: str = "process") -> NvmeStore:
    return NvmeStore(HiCacheExtConfig(path=(str(path),), capacity=128 << 20, engine="posix", durability=durability))


def writer(path: str, durability: str) -> None:
    """The other process: writes as many pages as each line on stdin says, and answers."""
    store, memory, done = open_store(Path(path), durability), payload(), 0
    ns = store.namespace(PRINT)
    print("ready", flush=True)
    for line in sys.stdin:
        end = done + int(line)
        store.write(ns, KEYS[done:end], regions_of_array(memory[done:end]))
        done = end
        print(done, flush=True)


class Writer:
    def __init__(self, path: Path, durability: str) -> None:
        code = f"import test_durability as t; t.writer({str(path)!r}, {durability!r})"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, pages: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{pages}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=30)


@pytest.fixture(params=["process", "device"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Writer]:
    other = Writer(tmp_path / "kv", request.param)
    yield other
    other.kill()


@pytest.mark.slow
def test_what_the_handle_calls_durable_another_process_reads_even_after_the_writer_was_killed(
    other: Writer, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "kv")
    ns = store.namespace(PRINT)
    prefix = DurablePrefix(store, ns, KEYS, hold_s=30.0)
    assert not prefix.wait(0.0)
    other.ask(5)
    other.answer()
    assert not prefix.wait(0.05)
    assert prefix.durable_pages() == 5
    other.ask(PAGES - 5)
    assert prefix.wait(30.0)
    other.kill()
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    assert store.read(ns, KEYS, regions_of_array(memory)).outcomes == (Outcome.LOADED,) * PAGES
    assert (memory == payload()).all()
    store.close()


@pytest.mark.slow
def test_the_command_waits_for_a_namespace_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    open_store(path).close()
    args = ["wait", str(path), "--tokens", json.dumps(TOKENS), "--namespace", "durable", "--json"]
    early = CliRunner().invoke(app, [*args, "--timeout", "0"])
    assert (early.exit_code, json.loads(early.stdout)["durable"]) == (1, False)
    other = Writer(path, "process")
    timer = threading.Timer(0.3, other.ask, (PAGES,))
    timer.start()
    done = CliRunner().invoke(app, [*args, "--timeout", "30"])
    timer.join()
    other.kill()
    document = json.loads(done.stdout)
    assert (done.exit_code, document["durable"]) == (0, True)
    assert [(n["durable_pages"], n["pages"]) for n in document["namespaces"]] == [(PAGES, PAGES)]
    two = CliRunner().invoke(app, [*args, "--timeout", "0", "--ranks", "2"])
    assert two.exit_code == 1


def test_the_handle_is_made_for_any_store_and_counts_only_the_leading_pages() -> None:
    store = MemoryStore()
    ns = store.namespace(PRINT)
    prefix = DurablePrefix(store, ns, KEYS)
    store.write(ns, KEYS[1:], regions_of_array(payload()[1:]))
    assert (prefix.durable_pages(), prefix.is_durable()) == (0, False)
    store.write(ns, KEYS[:1], regions_of_array(payload()[:1]))
    assert prefix.wait(0.0)
    assert DurablePrefix(store, ns, []).is_durable()
