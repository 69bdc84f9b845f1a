"""The prefill process of bench_pd: computes by waiting, sends by one of three ways."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pd_bench.shape import KvMemory, ModelShape
from sglang_hicache_ext.pd.drivers import make_transport
from sglang_hicache_ext.pd.hooks import Chunk, TransferKey
from sglang_hicache_ext.pd.prefill import PrefillEndpoint
from sglang_hicache_ext.pd.settings import PdSettings
from sglang_hicache_ext.testing.pd_link import ThrottledTransport

WHOLE, CHUNKS, LAYERS = "whole request", "chunk-wise", "layer groups"


@dataclass(frozen=True)
class Job:
    """One request: ``forward_tokens`` is the most that one forward computes, ``tokens_per_s`` how fast."""

    room: int
    tokens: int
    way: str
    forward_tokens: int
    tokens_per_s: float
    bytes_per_s: float
    seed: int


class PrefillProcess:
    def __init__(self, shape: ModelShape, tokens: int, settings: PdSettings) -> None:
        self.shape, self.memory = shape, KvMemory(shape, tokens)
        self.link = ThrottledTransport(make_transport(settings), 1e12)
        self.end = PrefillEndpoint(self.memory.geometry(), self.link, settings)

    def run(self, job: Job) -> dict[str, Any]:
        """Returns the times of the computing, on the clock that all processes share."""
        self.link.bytes_per_s = job.bytes_per_s
        pages = np.random.default_rng(job.seed).permutation(self.memory.slots)[
            : -(-job.tokens // self.shape.page_tokens)
        ]
        self.memory.fill(pages, job.room)
        key = self._reservation(job.room)
        forwards = self._forwards(job, pages)
        begun = time.monotonic()
        ends_at = begun
        for at, (first, part, tokens) in enumerate(forwards):
            is_last = at == len(forwards) - 1
            ends_at += tokens / job.tokens_per_s
            self._forward(job, key, first, part, is_last, ends_at - tokens / job.tokens_per_s, ends_at)
        if job.way == WHOLE:
            self._send(key, 0, pages, True)
        computed = time.monotonic()
        deadline = computed + 120
        while not self.end.status(key).is_settled and time.monotonic() < deadline:
            time.sleep(0.001)
        status = self.end.status(key)
        self.end.forget(key)
        return {"begun": begun, "compute_s": ends_at - begun, "state": str(status.state), "reason": status.reason}

    def _reservation(self, room: int) -> TransferKey:
        deadline = time.monotonic() + 20
        while not (found := self.end.reservations(room)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no reservation of room {room}")
            time.sleep(0.0005)
        return found[0].key

    def _forwards(self, job: Job, pages: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64], int]]:
        """(first page, pages, tokens) of each forward."""
        step = job.forward_tokens // self.shape.page_tokens
        cuts = range(0, len(pages), step)
        return [
            (a, pages[a : a + step], min(job.forward_tokens, job.tokens - a * self.shape.page_tokens)) for a in cuts
        ]

    def _forward(
        self, job: Job, key: TransferKey, first: int, pages: NDArray[np.int64], is_last: bool, start: float, end: float
    ) -> None:
        hooks = self.end.start_save_kv([_chunk(key, first, pages, is_last)]) if job.way == LAYERS else None
        for layer in range(self.shape.layers):
            wait_until(start + (end - start) * (layer + 1) / self.shape.layers)
            if hooks is not None:
                hooks.save_kv_layer(layer)
        if hooks is not None:
            hooks.finish()
        elif job.way == CHUNKS:
            self._send(key, first, pages, is_last)

    def _send(self, key: TransferKey, first: int, pages: NDArray[np.int64], is_last: bool) -> None:
        self.end.start_save_kv([_chunk(key, first, pages, is_last)], layered=False).finish()


def _chunk(key: TransferKey, first: int, pages: NDArray[np.int64], is_last: bool) -> Chunk:
    return Chunk(key, first, pages, is_last, {"aux": np.array([0])} if is_last else {})


def wait_until(when: float) -> None:
    left = when - time.monotonic()
    if left > 0:
        time.sleep(left)


def serve(pipe: Connection, shape: ModelShape, tokens: int, settings: PdSettings) -> None:
    """Main of the process: a Job in, its times out, until None."""
    process = PrefillProcess(shape, tokens, settings)
    pipe.send(process.end.address)
    while (job := pipe.recv()) is not None:
        try:
            pipe.send(process.run(job))
        except Exception as e:
            pipe.send({"error": f"{type(e).__name__}: {e}"})
    pipe.send(process.end.describe())
    process.end.close()
