"""A cold read of a prefix half on NVMe, half remote, against each half alone."""

from __future__ import annotations

import time
from pathlib import Path

from harness import Arena, Arm, Measurement, Run, Spread, Trial, drop_page_cache, files_below, page_keys, spread_of

from remote_bench.throughput import FINGERPRINT
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore
from sglang_hicache_ext.storage_backends.tiered import TieredStore

CASE = "prefix, half near and half far"


def run_tiers(run: Run, cluster: LocalCluster, path: str, pages: int, page_bytes: int, rounds: int) -> Spread | None:
    """Measure; returns tiered / slower half, taken within each round."""
    raw = {
        "master": cluster.master_address, "path": f"{path}/near", "capacity": 2 * pages * page_bytes + (256 << 20),
        "remote_write_policy": "none", "near_admission": "none",
    }  # fmt: skip
    config = HiCacheExtConfig.parse(raw)
    near, far = NvmeStore(config), RemoteStore(config)
    store = TieredStore(config, near=near, far=far)
    ns = store.namespace(FINGERPRINT)
    keys = page_keys(pages, "tiers")
    arena = Arena(pages, page_bytes)
    half = pages // 2
    arena.stamp(keys)
    for tier, start in ((near, 0), (far, half)):
        wrote = tier.write(ns, keys[start : start + half], arena.regions(start, start + half))
        if not all(o.is_stored for o in wrote.outcomes):
            raise RuntimeError(f"a tier refused pages: {set(wrote.outcomes)}")
    near.flush()

    def sample(first: int, last: int) -> Measurement:
        drop_page_cache(files_below(Path(path) / "near"))
        arena.blank()
        started = time.perf_counter()
        outcomes = store.read(ns, keys[first:last], arena.regions(first, last)).outcomes
        took = time.perf_counter() - started
        if set(outcomes) != {Outcome.LOADED}:
            raise RuntimeError(f"read: {set(outcomes)}")
        arena.require(keys[first:last], first)
        return Measurement({"batch_ms": took * 1e3, "gb_s": (last - first) * page_bytes / took / 1e9})

    def arm(name: str, first: int, last: int) -> Arm:
        def take(_trial: Trial) -> Measurement:
            return sample(first, last)

        return Arm(name, take, raw, store.describe, is_required=True)

    run.measure(CASE, [arm("near half", 0, half), arm("far half", half, pages), arm("both", 0, pages)], rounds)
    store.close()
    columns = [run.values(CASE, name, "batch_ms") for name in ("near half", "far half", "both")]
    return spread_of(b / max(n, f) for n, f, b in zip(*columns, strict=False))
