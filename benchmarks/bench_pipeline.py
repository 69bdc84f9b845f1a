"""What the prefetch pipeline is worth: small requests behind a large one, throughput, and its own cost.

The first two compare with SGLang's own pipeline: the same real UnifiedRadixCache, controller, host pool and NVMe
store, only the pipeline differs. The cost is CPU time a page over the memory store, the store's own calls excluded.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Arm, BadInput, Goal, Measurement, Run, Trial, WrongBytes, entry, parser, writable_directory
from pipeline_bench import alone
from pipeline_bench.child import SglangChild

from sglang_hicache_ext.config import GIB, MIB, HiCacheExtConfig
from sglang_hicache_ext.scheduling import BatchSizes
from sglang_hicache_ext.storage_backends import open_store
from sglang_hicache_ext.trace import Trace

LINE, COST = "small behind large", "own cost"


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__ or "", rounds=5)
    made.add_argument("--path", default="", help="directory on the drive to measure; a temporary one when empty")
    made.add_argument("--trace", metavar="FILE", default="", help="write a Chrome trace of one run over the NVMe store")
    args = made.parse_args(argv)
    base = writable_directory(args.path, "--path") if args.path else tempfile.gettempdir()
    scratch = tempfile.mkdtemp(prefix="bench_pipeline_", dir=base)
    try:
        return measure(args, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def measure(args: Any, scratch: str) -> int:
    large, small, count = (1000, 20, 10) if args.smoke else (10_000, 100, 20)
    run = Run("bench_pipeline", path=scratch, requested=vars(args), seed=args.seed, is_smoke=args.smoke)
    task = {
        "path": os.path.join(scratch, "store"),
        "large_pages": large,
        "small_pages": small,
        "small_requests": count,
        "capacity": (256 * MIB if args.smoke else 2 * GIB),
    }
    child = SglangChild(task)
    if child.filled["written"] != child.filled["total"]:
        raise BadInput(f"--path: the store took {child.filled['written']} of {child.filled['total']} pages")
    gb = child.filled["total"] * child.filled["page_bytes"] / 1e9
    arms = [
        Arm("extension", lambda t: compare(child, "extension", gb), is_required=True),
        Arm("sglang", lambda t: compare(child, "sglang", gb), is_required=True, close=child.close),
    ]
    run.measure(LINE, arms, rounds=args.rounds)
    run.measure(COST, [Arm("extension", lambda t: own_cost(t, args.smoke), is_required=True)], rounds=args.rounds)
    conclude(run, child.filled)
    if args.trace:
        write_trace(run, scratch, args)
    return run.finish(args.json, args.report, args.plots)


def compare(child: SglangChild, pipeline: str, gb: float) -> Measurement:
    """One trial: every request submitted at once, the large one first."""
    answer = child.ask(pipeline)
    if answer["wrong"] or answer["pages"] != child.filled["total"]:
        raise WrongBytes(f"{pipeline}: {answer['pages']} pages, {answer['wrong']} wrong")
    small_ms = [1000 * s for s in answer["small_s"]]
    values = {
        "small_median_ms": statistics.median(small_ms),
        "large_ms": 1000 * answer["large_s"],
        "gb_s": gb / answer["total_s"],
    }
    return Measurement(values, {"small_ms": small_ms}, {"pages": answer["pages"]})


def own_cost(trial: Trial, is_smoke: bool) -> Measurement:
    """CPU time of everything but the store's calls, for pages of 4 KiB in batches of 128."""
    from sglang_hicache_ext.storage_backends.memory import MemoryStore

    requests, pages = (8, 256) if is_smoke else (24, 1280)
    store = alone.TimedStore(MemoryStore(HiCacheExtConfig(capacity=GIB)))
    prompts = {f"r{i}": alone.fill(store, f"r{i}", pages, 4096) for i in range(requests)}
    store.cpu_s = 0.0
    found = alone.drive(store, prompts, 4096, BatchSizes(128, 128))
    us = 1e6 * (found["cpu_s"] - store.cpu_s) / found["pages"]
    return Measurement({"overhead_us_per_page": us, "pages": found["pages"]})


def conclude(run: Run, filled: dict[str, Any]) -> None:
    run.extra["store"] = filled["store"]
    run.notes.append(f"pages of {filled['page_bytes']} bytes; O_DIRECT as the store reports it under extra.store")
    line = run.ratio(LINE, "extension", "sglang", "small_median_ms")
    run.conclude(
        "small_behind_large", line, Goal("<=", 0.25, "median completion of the small requests, ours / SGLang's")
    )
    rate = run.ratio(LINE, "extension", "sglang", "gb_s")
    run.conclude("throughput_vs_sglang", rate, Goal(">=", 0.95, "bytes a second of the whole load, ours / SGLang's"))
    cost = run.spread(COST, "extension", "overhead_us_per_page")
    run.conclude(
        "overhead_us_per_page", cost, Goal("<=", 5.0, "CPU a page at 128-page batches, the store's calls excluded")
    )


def write_trace(run: Run, scratch: str, args: Any) -> None:
    """One traced run without SGLang; the overlap of its stages goes into the result."""
    store = open_store(HiCacheExtConfig(path=(os.path.join(scratch, "traced"),), capacity=GIB), "nvme")
    trace = Trace()
    try:
        prompts = {"large": alone.fill(store, "large", 1000 if args.smoke else 4000, 65536)}
        prompts |= {f"small{i}": alone.fill(store, f"small{i}", 100, 65536) for i in range(10)}
        alone.drive(store, prompts, 65536, BatchSizes(), trace)
    finally:
        store.close()
    trace.write(args.trace)
    run.extra["overlap_s"] = alone.stages_overlap(trace)


if __name__ == "__main__":
    raise SystemExit(entry(main))
