"""The cluster model with one node against a real run of one engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import Run
from simulator.calibrate import read_result
from simulator.cluster import ClusterSpec, simulate_cluster

from policy_bench import real
from policy_bench.engine import Bench
from sglang_hicache_ext.errors import ConfigError

POLICY, STORE = "wait_complete", "constant"


def check_single_node(run: Run, path: str) -> None:
    """Simulate the requests of a real run and put the error of the median TTFT into the summary."""
    found = read_result(path, "compare_policies")
    facts = found.get("extra", {}).get("real")
    times = [
        t
        for s in found.get("samples", ())
        if (s["case"], s["arm"]) == (f"real engine / {STORE}", POLICY)
        for t in s["series"].get("ttft_s", ())
    ]
    if not facts or not times:
        raise ConfigError(
            f"no real run of {POLICY} over the {STORE} store",
            path,
            "write it with compare_policies.py --real DIR --json",
        )
    machine = real.Machine(**facts["machine"])
    bench = Bench(Path(), facts["seed"], facts["requests"])
    control = facts["controls"][STORE]
    node = real.node_of(machine, control)
    spec = ClusterSpec(
        nodes=1,
        node=replace(node, l3_write_Bps=1e12),
        drives=1,
        drive_read_Bps=control["bandwidth_Bps"],
        drive_delay_s=control["model"]["base_s"],
        nic_Bps=0.0,
    )
    result = simulate_cluster(real.load_of(bench, machine), spec, POLICY, real.settings())
    measured, model = float(np.median(times)), float(np.median(result.ttft_s))
    run.notes.append(
        f"one node against a real engine ({len(times)} requests, {POLICY}, {STORE} store): TTFT p50 measured {measured:.3f} s, "
        f"model {model:.3f} s, error {(model - measured) / measured:+.1%}"
    )
    run.conclude("single_node_error", (model - measured) / measured)
