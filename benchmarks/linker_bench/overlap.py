"""The linker's own load queue, store and pools under a forward of known length, on a drive of known bandwidth.

The forward waits for a layer, as SGLang's does, and then takes a fixed time for it, asleep: a GPU that computes leaves
the processors alone. The drive is the real one, slowed to ``bytes_per_s``.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Measurement, WrongBytes

from linker_bench.device import PAGE_TOKENS, view
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.sglang_adapter.linker_loads import Batch, LoadQueue
from sglang_hicache_ext.sglang_adapter.linker_offload import copy_out
from sglang_hicache_ext.sglang_adapter.linker_paths import DirectPath
from sglang_hicache_ext.sglang_adapter.linker_source import PoolLoad
from sglang_hicache_ext.storage_backends.engines import open_engine
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredPages
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.engine_faults import ThrottledEngine


class Counter:
    """SGLang's layer counter, without SGLang."""

    def __init__(self, layers: int) -> None:
        self.layers, self.futures = layers, dict[int, list[Future[None]]]()

    def begin(self, index: int) -> None:
        self.futures[index] = [Future() for _ in range(self.layers)]

    def complete(self, index: int, layer: int) -> None:
        self.futures[index][layer].set_result(None)

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.futures[index]:
            if not future.done():
                future.set_exception(error)

    def wait(self, index: int, layer: int) -> None:
        self.futures[index][layer].exception(60)

    def finish(self, index: int) -> bool:
        return all(f.exception(60) is None for f in self.futures.pop(index))


class SlowDrive:
    """Pages of random KV on a slowed drive, and a pool to load them into."""

    def __init__(self, path: str, layers: int, pages: int) -> None:
        self.layers, self.count = layers, pages
        engine = open_engine("auto", str(Path(path)))
        self._throttle = ThrottledEngine(engine, 1e12)
        config = HiCacheExtConfig.parse({"path": str(Path(path) / "slow"), "capacity": "1GiB"})
        self.store = NvmeStore(config, engine=self._throttle)
        self.pool, self._source = view(layers, pages, "cpu"), view(layers, pages, "cpu")
        for buffers in self._source.buffers:
            for buffer in buffers:
                buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
        self.pages, self.ns = LayeredPages(self.store, self.pool.geometry), self.store.namespace(Fingerprint("bench"))
        self.keys = [bytes([i]) * 32 for i in range(pages)]
        self._write()
        self.counter = Counter(layers)
        self.queue = LoadQueue(self.counter, Metrics(), step_s=60.0, threads=2)
        self._index = 0

    def _write(self) -> None:
        rows = np.arange(self.count, dtype=np.int64) * PAGE_TOKENS
        for at in range(0, self.count, 8):
            part = rows[at : at + 8]
            memory = torch.zeros((len(part), self.pool.geometry.page_bytes), dtype=torch.uint8)
            copy_out(self._source, part, memory)
            outcomes = self.pages.write(self.ns, self.keys[at : at + 8], memory.numpy()).outcomes
            if not all(o.is_stored for o in outcomes):
                raise RuntimeError(f"the pages could not be written: {outcomes}")

    @property
    def load_bytes(self) -> int:
        return self.count * self.pool.geometry.page_bytes

    def forward(self, bytes_per_s: float, layer_s: float, is_synchronous: bool) -> Measurement:
        """Load and compute once; TTFT from the start of the load to the end of the last layer."""
        self._throttle._bytes_per_s = bytes_per_s
        self._index += 1
        index, slots = self._index, torch.arange(self.count * PAGE_TOKENS)
        for buffers in self.pool.buffers:
            for buffer in buffers:
                buffer.zero_()
        self.counter.begin(index)
        source = PoolLoad(self.pool, self.pages, self.ns, self.keys, [slots], DirectPath(), None)
        started = time.perf_counter()
        self.queue.submit(Batch(index, {"kv": source}, tuple(("kv", n) for n in range(self.layers))))
        if is_synchronous:
            self.counter.wait(index, self.layers - 1)
            for layer in range(self.layers):
                self.counter.wait(index, layer)
        waits, load_s = [], 0.0
        for layer in range(self.layers):
            before = time.perf_counter()
            self.counter.wait(index, layer)
            waits.append(1000 * (time.perf_counter() - before))
            load_s = time.perf_counter() - started
            time.sleep(layer_s)
        ttft = time.perf_counter() - started
        if not self.queue.finish(index):
            raise RuntimeError("the load failed")
        self._check()
        return Measurement({"ttft_ms": 1000 * ttft, "last_layer_ms": 1000 * load_s}, {"wait_ms": waits}, {})

    def _check(self) -> None:
        for mine, theirs in zip(self.pool.buffers, self._source.buffers, strict=True):
            if not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
                raise WrongBytes("the pool does not hold what was stored")

    def close(self) -> None:
        self.queue.close()
        self.store.close()

    def describe(self) -> dict[str, Any]:
        return {"layers": self.layers, "pages": self.count, "load_bytes": self.load_bytes, **self.store.describe()}
