"""Four directories against one, each behind an engine of fixed bandwidth: is the work of a batch really spread?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

from harness import Arena, Arm, Measurement, Meter, Run, Spread, Trial, page_keys

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.storage_backends import open_store
from sglang_hicache_ext.storage_backends.engines import open_engine
from sglang_hicache_ext.testing.engine_faults import ThrottledEngine
from storage_bench.shape import BATCH_PAGES, GIB, KIB
from storage_bench.verdict import GOALS

DRIVE_BYTES_PER_S = 30e6
"""Bandwidth of one simulated drive; four together stay far below any real one."""

PAGE_BYTES = 256 * KIB
DEADLINE_S = 60.0


class Striped:
    """A store over ``directories`` simulated drives, with one engine for all of them, as the product opens it."""

    def __init__(self, path: str, directories: int, arena: Arena) -> None:
        roots = [os.path.join(path, f"{directories}-{i}") for i in range(directories)]
        for root in roots:
            os.makedirs(root, mode=0o700)
        engine = ThrottledEngine(open_engine("auto", path), DRIVE_BYTES_PER_S)
        config = HiCacheExtConfig.parse({"path": roots, "capacity": 4 * GIB, "reinsert": False})
        self.store: Any = open_store(config, engine=engine)
        self._ns = self.store.namespace(Fingerprint(model="bench_storage stripe", page_tokens=1))
        self._arena = arena
        self._keys: list[bytes] = []

    def write(self, trial: Trial) -> Measurement:
        self._keys = page_keys(self._arena.pages, f"stripe {trial.seed}")
        self._arena.stamp(self._keys)
        return self._timed(self._stored)

    def _stored(self, keys: list[bytes], start: int) -> None:
        regions = self._arena.regions(start, start + len(keys))
        if not all(o.is_stored for o in self.store.write(self._ns, keys, regions, DEADLINE_S).outcomes):
            raise RuntimeError("a page was not stored")

    def read(self, trial: Trial) -> Measurement:
        """Prefixes come back in the order they were written in; which of them comes first is random."""
        starts = trial.rng.permutation(range(0, len(self._keys), BATCH_PAGES))
        keys = [key for start in starts for key in self._keys[start : start + BATCH_PAGES]]
        self._arena.blank()
        found = self._timed(self._loaded, keys)
        self._arena.require(keys, what="a striped read")
        return found

    def _loaded(self, keys: list[bytes], start: int) -> None:
        regions = self._arena.regions(start, start + len(keys))
        if any(o is not Outcome.LOADED for o in self.store.read(self._ns, keys, regions, DEADLINE_S).outcomes):
            raise RuntimeError("a page was not loaded")

    def _timed(self, work: Callable[[list[bytes], int], None], keys: list[bytes] | None = None) -> Measurement:
        own = self._keys if keys is None else keys
        with Meter() as meter:
            for start in range(0, len(own), BATCH_PAGES):
                work(own[start : start + BATCH_PAGES], start)
        return Measurement({"gb_s": len(own) * PAGE_BYTES / 1e9 / meter.wall_s})


def run_stripe(run: Run, path: str, rounds: int, is_smoke: bool) -> bool:
    """Write and read, one directory against four; the worse ratio counts. False when the run is void."""
    os.makedirs(path, mode=0o700)
    arena = Arena(BATCH_PAGES * (1 if is_smoke else 2), PAGE_BYTES)
    stores = {n: Striped(path, n, arena) for n in (1, 4)}
    try:
        for name in ("write", "read"):
            arms = [
                Arm(f"{n} directories", getattr(s, name), {"directories": n}, s.store.describe, is_required=True)
                for n, s in stores.items()
            ]
            if not run.measure(f"stripe {name}", arms, 1 if is_smoke else min(rounds, 3), warm_up=1):
                return False
    finally:
        for s in stores.values():
            s.store.close()
        shutil.rmtree(path, ignore_errors=True)
    ratios = [run.ratio(f"stripe {n}", "4 directories", "1 directories", "gb_s") for n in ("write", "read")]
    found: list[Spread] = [r for r in ratios if r is not None]
    run.conclude("stripe4_vs_1", min(found, key=lambda r: r.p50) if len(found) == 2 else None, GOALS["stripe4_vs_1"])
    run.extra["stripe"] = {"drive_bytes_per_s": DRIVE_BYTES_PER_S, "page_bytes": PAGE_BYTES, "pages": arena.pages}
    return True
