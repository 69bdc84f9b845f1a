"""Prefetch beside PD-like layer traffic: not at all, free, and under the arbiter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import Arena, Arm, Measurement, Run, Trial, page_keys

from remote_bench.throughput import FINGERPRINT
from sglang_hicache_ext.arbiter import Arbiter
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore

CASE = "layers of 2 MiB every {ms:g} ms"
LAYER_BYTES = 2 << 20
SCRIPT = str(Path(__file__).with_name("layers.py"))


@contextmanager
def layer_sink() -> Iterator[int]:
    """A process that acknowledges layers; gives its port."""
    process = subprocess.Popen([sys.executable, SCRIPT, "sink"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def layer_times(port: int, period_s: float, seconds: float, arbiter: str) -> list[float]:
    """Run a source to its end; milliseconds of each layer."""
    command = [sys.executable, SCRIPT, "source", str(port), str(LAYER_BYTES), str(period_s), str(seconds), arbiter]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=seconds + 60)
    times: list[float] = json.loads(done.stdout)
    return times


class Prefetcher:
    """Reads the same pages again and again until told to stop; counts what it moved."""

    def __init__(self, store: RemoteStore, keys: list[bytes], arena: Arena) -> None:
        self._store, self._keys, self._arena = store, keys, arena
        self._ns = store.namespace(FINGERPRINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.nbytes, self.seconds, self.error = 0, 0.0, ""

    def _run(self) -> None:
        started = time.perf_counter()
        while not self._stop.is_set():
            outcomes = self._store.read(self._ns, self._keys, self._arena.regions(), 30.0).outcomes
            if set(outcomes) != {Outcome.LOADED}:
                self.error = f"read: {set(outcomes)}"
                return
            self.nbytes += len(self._keys) * self._arena.page_bytes
        self.seconds = time.perf_counter() - started

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self.error or self._thread.is_alive():
            raise RuntimeError(self.error or "the prefetch does not end")


def run_interference(
    run: Run, cluster: LocalCluster, page_bytes: int, period_s: float, seconds: float, rounds: int
) -> str:
    """Measure; returns the case's name."""
    config = HiCacheExtConfig.parse({"master": cluster.master_address})
    name = f"bench-{os.getpid()}"
    arbiter = Arbiter(name)
    stores = {"free": RemoteStore(config), "arbiter": RemoteStore(config, arbiter=arbiter)}
    keys = page_keys(64, f"interference {page_bytes}")
    arena = Arena(len(keys), page_bytes)
    arena.stamp(keys)
    ns = stores["free"].namespace(FINGERPRINT)
    stores["free"].write(ns, keys, arena.regions())
    case = CASE.format(ms=period_s * 1e3)

    def sample(store: RemoteStore | None, port: int) -> Measurement:
        arena.blank()
        if store is None:
            times, moved = layer_times(port, period_s, seconds, name), 0.0
        else:
            with Prefetcher(store, keys, arena) as prefetch:
                times = layer_times(port, period_s, seconds, name)
            moved = prefetch.nbytes / prefetch.seconds / 1e9
            arena.require(keys)
        values = {"layer_p50_ms": float(np.percentile(times, 50)), "layer_p95_ms": float(np.percentile(times, 95))}
        return Measurement({**values, "layers_per_s": len(times) / seconds, "gb_s": moved}, {"layer_ms": times})

    def arm(label: str, store: RemoteStore | None, port: int) -> Arm:
        def take(_trial: Trial) -> Measurement:
            return sample(store, port)

        return Arm(label, take, is_required=True)

    with layer_sink() as port:
        arms = [arm("no prefetch", None, port), *(arm(label, store, port) for label, store in stores.items())]
        run.measure(case, arms, rounds)
    run.extra["arbiter"] = arbiter.describe()
    for store in stores.values():
        store.close()
    arbiter.close(remove=True)
    return case
