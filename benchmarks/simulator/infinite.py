"""The simulator against the truth that needs no simulator: with room for everything, every repeated prefix hits."""

from __future__ import annotations

from dataclasses import replace

from sglang_hicache_ext.testing.latency import Constant
from simulator.engine import simulate
from simulator.spec import NodeSpec
from simulator.trace import Load


def simulated_hit_rate(load: Load) -> float:
    """Share of pages served by caches on a node without limits, requests far apart so that none races another."""
    spaced = tuple(replace(r, arrival_s=float(i)) for i, r in enumerate(load.requests))
    endless = load.page_tokens * (sum(len(r.pages) for r in load.requests) + 1)
    node = NodeSpec(
        prefill_tokens_per_s=1e12,
        prefill_overhead_s=0.0,
        l1_tokens=1,
        l2_tokens=endless,
        l3_read_Bps=1e18,
        l3_write_Bps=1e18,
    )
    columns = simulate(replace(load, requests=spaced, stored=()), node, Constant(base_s=0.0), "wait_complete")
    return columns.cached_pages / max(1, columns.input_pages)
