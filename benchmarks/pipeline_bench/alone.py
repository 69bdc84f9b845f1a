"""The pipeline without SGLang: its own cost over the memory store, and a trace over the NVMe store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.budget import BudgetSettings
from sglang_hicache_ext.keys import Fingerprint, key_bytes
from sglang_hicache_ext.operation import PrefetchRequest
from sglang_hicache_ext.page import Regions, regions_of_array
from sglang_hicache_ext.pipeline import Pipeline
from sglang_hicache_ext.pipeline_settings import PipelineSettings
from sglang_hicache_ext.policy import make_policy
from sglang_hicache_ext.ports import Namespace, PageStore, ReadResult
from sglang_hicache_ext.scheduling import BatchSizes
from sglang_hicache_ext.testing.fakes import fake_hashes
from sglang_hicache_ext.trace import Trace

PRINT = Fingerprint("bench_pipeline", page_tokens=64)


class ArrayPool:
    """Host pages in one array, kept in insertion order; inserted pages come back when the next round starts."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        raw = np.zeros(pages * page_bytes + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        self.memory = raw[start : start + pages * page_bytes].reshape(pages, page_bytes)
        self._regions = regions_of_array(self.memory)
        self._free = np.arange(pages, dtype=np.int64)

    @property
    def total_pages(self) -> int:
        return len(self.memory)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def alloc(self, pages: int) -> NDArray[np.int64] | None:
        if pages > len(self._free):
            return None
        taken, self._free = self._free[:pages].copy(), self._free[pages:]
        return taken

    def free(self, pages: NDArray[np.int64]) -> None:
        self._free = np.concatenate((self._free, pages))

    def reclaim(self, pages: int, unused_since: float) -> int:
        return 0

    def regions(self, pages: NDArray[np.int64]) -> Regions:
        return self._regions.take(pages)


class ListIndex:
    """A host tree that only remembers what was inserted."""

    def __init__(self) -> None:
        self.inserted: list[NDArray[np.int64]] = []

    def insert_host(self, handle: Any, pages: NDArray[np.int64], hashes: Sequence[str]) -> int:
        self.inserted.append(pages)
        return 0


@dataclass
class TimedStore:
    """A store that counts the CPU time of its own calls, so that it can be taken off."""

    inner: Any
    cpu_s: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        began = time.thread_time()
        hit = self.inner.hit_pages(ns, keys, hold_s)
        self.cpu_s += time.thread_time() - began
        return int(hit)

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        began = time.thread_time()
        result: ReadResult = self.inner.read(ns, keys, regions, deadline_s)
        self.cpu_s += time.thread_time() - began
        return result


def fill(store: PageStore, name: str, pages: int, page_bytes: int) -> list[str]:
    """Store ``pages`` random pages under the hashes of ``name``."""
    hashes, ns = fake_hashes(name, pages), store.namespace(PRINT)
    block = np.random.default_rng(len(name)).integers(0, 256, (min(pages, 256), page_bytes), np.uint8)
    for at in range(0, pages, len(block)):
        part = hashes[at : at + len(block)]
        written = store.write(ns, [key_bytes(h) for h in part], regions_of_array(block[: len(part)]))
        if not all(o.is_stored for o in written.outcomes):
            raise RuntimeError(f"the store took {sum(o.is_stored for o in written.outcomes)} of {len(part)} pages")
    return hashes


def drive(
    store: PageStore, prompts: dict[str, list[str]], page_bytes: int, batches: BatchSizes, trace: Trace | None = None
) -> dict[str, float]:
    """Prefetch all prompts at once and wait for them; seconds, CPU seconds and pages loaded.

    The owner pumps every 2 ms; a scheduler's iteration is longer.
    """
    total = sum(map(len, prompts.values()))
    pool, index = ArrayPool(total + 128, page_bytes), ListIndex()
    settings = PipelineSettings(BudgetSettings(page_tokens=64, threshold_tokens=64, host_share=1.0), batches)
    pipeline = Pipeline(
        store, store.namespace(PRINT), pool, index, make_policy("wait_complete"), settings, trace=trace
    )  # fmt: skip
    began, cpu = time.perf_counter(), time.process_time()
    for rid, hashes in prompts.items():
        pipeline.submit(PrefetchRequest(rid, len(hashes), lambda h=hashes: h))  # type: ignore[misc]
    waiting, loaded = set(prompts), 0
    while waiting and time.perf_counter() - began < 120:
        pipeline.pump()
        for rid in list(waiting):
            poll = pipeline.poll(rid)
            if poll.is_ready:
                waiting.discard(rid)
                loaded += poll.result.loaded_pages if poll.result else 0
        time.sleep(0.002)
    answer = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "pages": float(loaded)}
    pipeline.close()
    if loaded != total:
        raise RuntimeError(f"{loaded} pages of {total} were loaded")
    return answer


def stages_overlap(trace: Trace) -> dict[str, float]:
    """Seconds in which work of different requests ran at the same time, for each pair of stages."""
    spans = [(s["cat"], s["name"].split(" ", 1)[1], s["ts"], s["ts"] + s["dur"]) for s in trace.spans]
    found: dict[str, float] = {}
    for i, (stage, rid, start, end) in enumerate(spans):
        for other, other_rid, other_start, other_end in spans[i + 1 :]:
            shared = min(end, other_end) - max(start, other_start)
            if rid != other_rid and shared > 0:
                pair = "+".join(sorted((stage, other)))
                found[pair] = found.get(pair, 0.0) + shared / 1e6
    return found
