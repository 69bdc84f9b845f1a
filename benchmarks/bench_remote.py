"""What the remote tier costs and keeps: against plain Mooncake, beside NVMe, and beside PD traffic.

    python benchmarks/bench_remote.py --json remote.json --report remote.html

Starts a Mooncake master and a store node on loopback TCP, so the figures compare ways of doing the same thing on one
machine; they say nothing about RDMA.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from harness import Goal, Run, choices, entry, parser, writable_directory
from remote_bench.interference import run_interference
from remote_bench.throughput import run_throughput
from remote_bench.tiers import run_tiers

from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster

PARTS = ("throughput", "tiers", "interference")
COLUMNS = ("gb_s", "batch_ms", "cpu_s_per_gb", "node_cpu_s_per_gb", "layer_p50_ms", "layer_p95_ms", "layers_per_s")
KIB = 1 << 10


def _options(argv: Sequence[str] | None) -> Namespace:
    p = parser((__doc__ or "").split("\n", 1)[0], rounds=9)
    p.add_argument("--path", default=".build/bench-remote", help="directory on the NVMe drive; scratch space")
    p.add_argument("--parts", default=",".join(PARTS), help="which parts to run")
    p.add_argument("--period-ms", type=float, default=12.0, help="time between two layers of the PD-like traffic")
    p.add_argument("--seconds", type=float, default=3.0, help="how long each interference sample lasts")
    args = p.parse_args(argv)
    if args.smoke:
        args.rounds, args.seconds = 1, 0.5
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _options(argv)
    parts = choices(args.parts, PARTS, "--parts")
    path = writable_directory(args.path, "--path")
    run = Run("bench_remote", path, vars(args), args.seed, args.smoke, COLUMNS)
    with (
        tempfile.TemporaryDirectory(prefix="bench-remote-", dir=path) as scratch,
        LocalCluster(Path(scratch) / "cluster", node_bytes=512 << 20, lease_ms=600_000) as cluster,
    ):
        if "throughput" in parts:
            case = run_throughput(run, cluster, 128, 256 * KIB, args.rounds, 1 if args.smoke else 4)
            run.conclude(
                "get_vs_plain",
                run.ratio(case, "ours", "plain", "gb_s"),
                Goal(">=", 0.8, "share of plain batch_get_into"),
            )
            run.conclude("get_vs_plain_huge_pages", run.ratio(case, "ours", "plain, huge pages", "gb_s"))
            run.conclude("process_vs_threads", run.ratio(case, "ours", "ours, in process", "gb_s"))
        if "tiers" in parts:
            ratio = run_tiers(run, cluster, scratch, 256, 256 * KIB, 2 * args.rounds)
            run.conclude("tiered_vs_slower_half", ratio, Goal("<=", 1.15, "both halves against the slower one"))
        if "interference" in parts:
            rounds = max(1, args.rounds // 2)
            case = run_interference(run, cluster, 256 * KIB, args.period_ms / 1e3, args.seconds, rounds)
            run.conclude(
                "arbiter_p95_ratio", run.ratio(case, "arbiter", "no prefetch", "layer_p95_ms"),
                Goal("<=", 1.2, "layer p95 with arbitrated prefetch against none"),
            )  # fmt: skip
            run.conclude("free_p95_ratio", run.ratio(case, "free", "no prefetch", "layer_p95_ms"))
            run.conclude(
                "arbiter_prefetch_share", run.ratio(case, "arbiter", "free", "gb_s"),
                Goal(">=", 0.8, "prefetch rate kept under the arbiter"),
            )  # fmt: skip
    return run.finish(args.json, args.report, args.plots)


if __name__ == "__main__":
    raise SystemExit(entry(main))
