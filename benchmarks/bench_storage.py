"""How fast the NVMe store moves pages, against SGLang's own backends and against the device itself.

    python benchmarks/bench_storage.py --path /mnt/nvme0/bench --json storage.json --report storage.html

Cold reads are proven cold, every page read is checked against its key, all arms take turns in one run. README.md
beside this file explains every column.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence

from harness import BadInput, Run, choices, entry, parser, positive, writable_directory
from storage_bench.bandwidth import ARMS, Plan, run_bandwidth
from storage_bench.index_scale import run_index
from storage_bench.shape import GIB, KIB, MIB, size_name
from storage_bench.stripe import run_stripe
from storage_bench.verdict import conclude_bandwidth, plot_bandwidth

from sglang_hicache_ext.config import parse_size
from sglang_hicache_ext.errors import ConfigError

PARTS = ("bandwidth", "index", "stripe")
SIZES = (16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB)
COLUMNS = ("gb_s", "synced_gb_s", "cpu_s_per_gb", "batch_ms", "page_ms")


def _options(argv: Sequence[str] | None) -> Namespace:
    p = parser(__doc__.split("\n", 1)[0], rounds=5)
    p.add_argument("--path", default=".build/bench-storage", help="directory on the drive to measure; scratch space")
    p.add_argument("--parts", default=",".join(PARTS), help="which parts to run")
    p.add_argument("--sizes", default=",".join(size_name(s) for s in SIZES), help="page sizes, 16k to 4m")
    p.add_argument("--orders", default="sequential,shuffled", help="read orders")
    p.add_argument("--threads", default="1,2,4", help="callers at once; more than one at 256k only")
    p.add_argument("--directions", default="read,write", help="what to measure")
    p.add_argument("--arms", default=",".join(ARMS), help="who takes part")
    p.add_argument("--sample-bytes", default="256MiB", help="bytes one sample moves; small pages move half")
    p.add_argument("--index-pages", type=positive, default=1_000_000, help="pages of 16 KiB in the index part")
    p.add_argument(
        "--full", action="store_true", help="all arms and all rounds in every case, not only where goals are"
    )
    args = p.parse_args(argv)
    if args.smoke:
        args.sizes, args.threads, args.sample_bytes, args.rounds = "32k,256k", "1", "16MiB", 1
        args.index_pages = min(args.index_pages, 2_000)
        if args.arms == ",".join(ARMS):  # nixl makes thousands of files: seconds here, minutes on a busy file system
            args.arms = ",".join(a for a in ARMS if not a.startswith("nixl"))
    return args


def _sizes(text: str) -> list[int]:
    known = {size_name(s): s for s in SIZES}
    return [known[name] for name in choices(text, tuple(known), "--sizes")]


def _plan(args: Namespace, path: str) -> Plan:
    try:
        sample_bytes = parse_size(args.sample_bytes, "--sample-bytes")
    except ConfigError as exc:
        raise BadInput(str(exc)) from exc
    threads = [int(t) for t in choices(args.threads, ("1", "2", "3", "4"), "--threads")]
    return Plan(
        path=path,
        sizes=_sizes(args.sizes),
        orders=choices(args.orders, ("sequential", "shuffled"), "--orders"),
        threads=threads,
        directions=choices(args.directions, ("read", "write"), "--directions"),
        arms=choices(args.arms, ARMS, "--arms"),
        sample_bytes=sample_bytes,
        rounds=args.rounds,
        is_smoke=args.smoke,
        is_full=args.full,
    )


def _require_space(path: str, plan: Plan, args: Namespace, parts: Sequence[str]) -> None:
    per_arm = max(plan.bytes_for(s) for s in plan.sizes) * 3 + 1024 * MIB
    wanted = per_arm * len(plan.arms) if "bandwidth" in parts else 0
    if "index" in parts:
        wanted = max(wanted, int(args.index_pages * 16 * KIB * 1.1) + GIB)
    free = shutil.disk_usage(path).free
    if free < wanted:
        raise BadInput(
            f"--path {path} has {free / GIB:.1f} GiB free, this run needs {wanted / GIB:.1f} GiB; "
            "free some, or lower --sample-bytes, --arms or --index-pages"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for; returns the exit code."""
    args = _options(argv)
    parts = choices(args.parts, PARTS, "--parts")
    base = writable_directory(args.path, "--path")
    plan = _plan(args, base)
    _require_space(base, plan, args, parts)
    path = tempfile.mkdtemp(prefix="run-", dir=base)
    plan = _plan(args, path)
    run = Run("bench_storage", path, requested=vars(args), seed=args.seed, is_smoke=args.smoke, columns=COLUMNS)
    try:
        is_valid = run_bandwidth(run, plan) if "bandwidth" in parts else True
        conclude_bandwidth(run)
        plot_bandwidth(run)
        if is_valid and "index" in parts:
            is_valid = run_index(run, os.path.join(path, "index"), args.index_pages)
        if is_valid and "stripe" in parts:
            run_stripe(run, os.path.join(path, "stripe"), args.rounds, args.smoke)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return run.finish(args.json, args.report, args.plots)


if __name__ == "__main__":
    raise SystemExit(entry(main))
