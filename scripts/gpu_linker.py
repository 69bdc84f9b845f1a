#!/usr/bin/env python3
"""The direct linker on a GPU, in one command and under five minutes.

    python scripts/gpu_linker.py /mnt/nvme0/scratch [--json out.json]

Tries GPUDirect Storage stage by stage with a real page, then loads pages into device memory through every path that
works (pinned ring, GDS, kvikio's own staging), compares every byte on the device, and prints GB/s and the first layer's
time. Where SGLang is installed, two servers with a small random model follow: TTFT through the linker and through the
`nvme` storage backend. Exit status: 0 all bytes right, 1 something is wrong, 2 no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

ROUNDS = 5


def paths(reads: Any) -> dict[str, Callable[[], Any]]:
    """Name -> opens the path; opening may refuse."""
    from sglang_hicache_ext.sglang_adapter.linker_gds import GdsPath
    from sglang_hicache_ext.sglang_adapter.linker_paths import BouncePath

    return {
        "bounce": lambda: BouncePath([reads.pool]),
        "gds": lambda: GdsPath(reads.store, [reads.pool], depth=32),
        "kvikio, any way": lambda: GdsPath(reads.store, [reads.pool], depth=32, allow_compat=True),
    }


def measure(reads: Any, opened: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Any]:
    """Every path ``rounds`` times in turn; a path that refuses is reported with its reason."""
    from sglang_hicache_ext.errors import CapabilityError

    usable: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, open_path in opened.items():
        try:
            usable[name] = open_path()
        except CapabilityError as error:
            found[name] = {"refused": str(error)}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in usable}
    for _ in range(rounds):
        for name, path in usable.items():
            samples[name].append(reads.load(path))
    for name, path in usable.items():
        medians = {key: statistics.median(s[key] for s in samples[name]) for key in samples[name][0]}
        found[name] = {**medians, "samples": samples[name], "path": path.describe()}
        path.close()
    return found


def run(directory: str, device: str = "cuda", **size: int) -> dict[str, Any]:
    """The whole check; returns what was found. Raises when a byte is wrong."""
    from linker_bench.device import DeviceReads

    from sglang_hicache_ext.cli.gds import gds

    scratch = tempfile.mkdtemp(prefix="gpu-linker-", dir=directory)
    try:
        stages = [f"{f.severity.name.lower()}: {f.what}" for f in gds(scratch)]
        reads = DeviceReads(scratch, device, **size)
        try:
            write_gb_s = reads.write()
            return {
                "stages": stages,
                **reads.describe(),
                "write_gb_s": write_gb_s,
                "paths": measure(reads, paths(reads)),
            }
        finally:
            reads.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def ttft(directory: str, device: str = "cuda", kind: str = "big", tokens: int = 4096) -> dict[str, Any]:
    """TTFT in milliseconds of the same prompts from the same drive, servers in turn; or why there is none."""
    if importlib.util.find_spec("sglang") is None:
        return {"skipped": "SGLang is not installed"}
    from cold_start_bench.servers import random_model
    from linker_bench.engines import Served, prompts

    scratch = Path(tempfile.mkdtemp(prefix="gpu-ttft-", dir=directory))
    try:
        with ExitStack() as opened:
            model, asked = random_model(kind, str(scratch / "model")), prompts(2, tokens, seed=1)
            served = [
                opened.enter_context(Served(n, model, kind, scratch / n, tokens, device)) for n in ("linker", "nvme")
            ]
            for one in served:
                one.fill(asked)
            times: dict[str, list[float]] = {one.name: [] for one in served}
            for _ in range(ROUNDS):
                for one in served:
                    times[one.name] += one.once(asked)
            return {
                "tokens": tokens,
                "ttft_ms": {name: statistics.median(found) for name, found in times.items()},
                "samples": times,
                "path": served[0].state().get("path"),
                "different_answers": {one.name: one.different for one in served},
            }
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", help="on the drive to read from")
    parser.add_argument("--json", default="", help="write the result here too")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    try:
        found = run(args.directory)
        found["ttft"] = ttft(args.directory)
    except Exception as error:
        print(f"FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    found["device"] = torch.cuda.get_device_name()
    print("\n".join(found["stages"]))
    for name, result in found["paths"].items():
        text = result.get("refused") or (
            f"{result['gb_s']:.2f} GB/s, first layer {result['first_layer_ms']:.1f} ms, bytes right"
        )
        print(f"{name:16} {text}")
    print(f"{'offload':16} {found['write_gb_s']:.2f} GB/s on {found['device']}")
    print(f"{'TTFT':16} {found['ttft'].get('skipped') or found['ttft']['ttft_ms']}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
