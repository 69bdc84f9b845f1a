"""What SGLang's metrics ask of a storage backend: pages and bandwidth since the last look. Cheap, never raises."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

from sglang_hicache_ext.sglang_adapter import sglang_api

MAX_SAMPLES = 1024
"""Batches remembered between two looks; older ones are dropped."""


class TransferStats:
    """Thread-safe: storage threads add, the scheduler thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: deque[tuple[int, float]] = deque(maxlen=MAX_SAMPLES)
        self._writes: deque[tuple[int, float]] = deque(maxlen=MAX_SAMPLES)
        self._totals: Counter[str] = Counter()

    def totals(self) -> dict[str, float]:
        """Pages, bytes and seconds of all good reads and writes so far."""
        with self._lock:
            return dict(self._totals)

    def read(self, pages: int, nbytes: int, seconds: float) -> None:
        self._add(self._reads, "read", pages, nbytes, seconds)

    def wrote(self, pages: int, nbytes: int, seconds: float) -> None:
        self._add(self._writes, "write", pages, nbytes, seconds)

    def _add(self, samples: deque[tuple[int, float]], name: str, pages: int, nbytes: int, seconds: float) -> None:
        if pages:
            with self._lock:
                samples.append((pages, nbytes / max(seconds, 1e-9) / 1e9))
                self._totals[f"{name}_pages"] += pages
                self._totals[f"{name}_bytes"] += nbytes
                self._totals[f"{name}_seconds"] += seconds  # type: ignore[assignment]

    def take(self) -> Any:
        """SGLang's StorageMetrics with what came in since the last call; None when nothing did."""
        with self._lock:
            if not self._reads and not self._writes:
                return None
            reads, writes = list(self._reads), list(self._writes)
            self._reads.clear()
            self._writes.clear()
        return sglang_api.storage_metrics()(
            prefetch_pgs=[p for p, _ in reads],
            backup_pgs=[p for p, _ in writes],
            prefetch_bandwidth=[b for _, b in reads],
            backup_bandwidth=[b for _, b in writes],
        )
