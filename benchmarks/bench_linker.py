"""Does the direct linker hide the load behind the compute, and what does it cost against the host path?

    python benchmarks/bench_linker.py --path /mnt/nvme0/bench --json linker.json

Part "overlap": the linker's load queue and store on a drive slowed to a known bandwidth, under a forward of known length
per layer; TTFT is held against max(load, compute) + first layer and printed next to a synchronous load.
Part "layout": one record a page with a digest per layer, against one record per page and layer.
Part "engines": two real SGLang servers on the CPU, one with the linker, one with the `nvme` storage backend.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from harness import Arm, Goal, Run, choices, entry, parser, positive, require_device, writable_directory
from linker_bench.layout import Layouts
from linker_bench.overlap import SlowDrive

PARTS = ("overlap", "layout", "engines")
LAYERS = 24
COLUMNS = ("ttft_ms", "last_layer_ms", "write_ms", "lookup_ms", "first_layer_ms", "load_ms", "entries_per_page")
RATIOS = (0.5, 1.0, 2.0)
"""Load time over compute time."""


def _options(argv: Sequence[str] | None) -> Namespace:
    p = parser(__doc__.split("\n", 1)[0], rounds=5)
    p.add_argument("--path", default=".build/bench-linker", help="directory on the drive to measure; scratch space")
    p.add_argument("--parts", default=",".join(PARTS), help=f"out of {', '.join(PARTS)}")
    p.add_argument("--compute-ms", type=positive, default=960, help="overlap: length of the forward")
    p.add_argument("--pages", type=positive, default=24, help="overlap: pages of a load")
    p.add_argument("--prompts", type=positive, default=3, help="engines: prompts a round")
    p.add_argument("--tokens", type=positive, default=1024, help="engines: stored tokens of a prompt, multiple of 64")
    p.add_argument("--model-kind", default="big", choices=("tiny", "big"), help="engines: random model of the CPU kit")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="engines: where SGLang runs")
    args = p.parse_args(argv)
    if args.smoke:
        args.rounds, args.compute_ms, args.pages, args.prompts, args.tokens = 1, 120, 4, 1, 256
        args.model_kind = "tiny"
    return args


def overlap(run: Run, args: Namespace, path: str) -> None:
    """TTFT at several ratios of load to compute, layer-wise and synchronous, interleaved."""
    drive = SlowDrive(path, LAYERS, args.pages)
    run.extra["overlap"] = drive.describe()
    compute_s = args.compute_ms / 1000
    efficiencies = []
    try:
        for ratio in RATIOS:
            case = f"load = {ratio:g} x compute"
            rate = drive.load_bytes / (ratio * compute_s)
            arms = [
                Arm(
                    name,
                    lambda trial, r=rate, s=name == "synchronous": drive.forward(r, compute_s / LAYERS, s),  # type: ignore[misc]
                    {"bytes_per_s": rate, "compute_s": compute_s},
                    is_required=True,
                )
                for name in ("layer-wise", "synchronous")
            ]
            run.measure(case, arms, args.rounds)
            bound = 1000 * (max(ratio, 1.0) * compute_s + ratio * compute_s / LAYERS)
            ttft, sync = run.median(case, "layer-wise", "ttft_ms"), run.median(case, "synchronous", "ttft_ms")
            if ttft and sync:
                efficiencies.append(bound / ttft)
                run.notes.append(
                    f"{case}: bound max(load, compute) + first layer {bound:.0f} ms, layer-wise {ttft:.0f} ms "
                    f"({bound / ttft:.2f} of the bound's speed), synchronous {sync:.0f} ms"
                )
                run.conclude(f"speedup_at_{ratio:g}", run.ratio(case, "synchronous", "layer-wise", "ttft_ms"))
    finally:
        drive.close()
    goal = Goal(">=", 1 / 1.15, "max(load, compute) + first layer, over TTFT; the worst of all ratios")
    run.conclude("overlap_efficiency", min(efficiencies, default=None), goal)


def layout(run: Run, args: Namespace, path: str) -> None:
    """Cost of the two forms on disk."""
    forms = Layouts(path, LAYERS, args.pages)
    run.measure("layout", [Arm("layered", forms.layered), Arm("records", forms.records)], args.rounds)
    for metric in ("write_ms", "lookup_ms", "first_layer_ms", "load_ms"):
        run.conclude(f"layered_vs_records_{metric}", run.ratio("layout", "layered", "records", metric))


def engines(run: Run, args: Namespace, path: str) -> None:
    """TTFT of the same prompts through the linker and through the host path."""
    from cold_start_bench.servers import random_model
    from linker_bench.engines import Served, prompts

    model = random_model(args.model_kind, os.path.join(path, "model"))
    asked = prompts(args.prompts, args.tokens // 64 * 64, args.seed)
    with ExitStack() as opened:
        served = []
        for name in ("linker", "nvme"):
            served.append(
                opened.enter_context(Served(name, model, args.model_kind, Path(path) / name, args.tokens, args.device))
            )
            served[-1].fill(asked)
        if served[0].expected != served[1].expected:
            run.failures.append("the two servers computed different tokens")
        arms = [
            Arm(s.name, partial(s.run, prompts=asked), {}, s.state, is_required=True)  # type: ignore[call-arg]
            for s in served
        ]
        run.measure("engines", arms, args.rounds)
    ratio = run.ratio("engines", "linker", "nvme", "ttft_ms")
    run.conclude("linker_vs_nvme", ratio, Goal("<=", 1.05, "TTFT of the linker over TTFT of the nvme backend"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    args = _options(argv)
    parts = choices(args.parts, PARTS, "--parts")
    require_device(args.device)
    base = writable_directory(args.path, "--path")
    path = tempfile.mkdtemp(prefix="run-", dir=base)
    run = Run("bench_linker", path, vars(args), args.seed, args.smoke, COLUMNS, sys.stdout)
    try:
        for name in parts:
            {"overlap": overlap, "layout": layout, "engines": engines}[name](run, args, path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return run.finish(args.json, args.report, args.plots)


if __name__ == "__main__":
    raise SystemExit(entry(main))
