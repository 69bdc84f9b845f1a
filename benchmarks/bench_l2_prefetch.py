"""Decode attention on one GPU: ceilings, correctness, prefetch distances, peers, and the planner's table at the end.

    python benchmarks/bench_l2_prefetch.py --out result.json --table kernels/l2_prefetch/tuning.json

Takes under 8 minutes on one GPU. Inputs rotate over copies of more than 5 times L2, in a CUDA graph, so that no
arm is served by a warm cache; every arm is timed twice and the difference is the noise. On a machine
without a GPU it prints the roofline floor of every shape: the time that no kernel can go below.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_hicache_ext.kernels.l2_prefetch.planner import Plan, Prefetch, split_counts
from sglang_hicache_ext.kernels.l2_prefetch.tuning import KV_BYTES, Gpu, Table, Tile, load_table

MODELS = {"llama-2-7b": (32, 32, 128), "llama-3-8b": (32, 8, 128), "qwen2.5-7b": (28, 4, 128)}
"""Query heads, KV heads, head dimension."""
SHAPES = [
    ("llama-2-7b", 1, 4096),
    ("llama-2-7b", 16, 4096),
    ("llama-2-7b", 64, 1024),
    ("llama-3-8b", 1, 4096),
    ("llama-3-8b", 1, 32768),
    ("llama-3-8b", 16, 4096),
    ("llama-3-8b", 64, 8192),
    ("qwen2.5-7b", 1, 32768),
    ("qwen2.5-7b", 16, 4096),
    ("qwen2.5-7b", 64, 8192),
]
"""Model, batch, context tokens."""
TILES = ((32, 1), (32, 3), (32, 5), (64, 2))
"""Tile tokens and stages; all compile without spills and with at most 128 registers at head dimension 128."""
PREFETCHES = (("none", 0, False), ("line", 1, False), ("line", 2, False), ("line", 4, False), ("line", 2, True))
L2_COPIES = 5
MIN_GAIN_PERCENT = 2.0
NCU = (
    "ncu --clock-control none --cache-control all -k regex:attend --csv --page raw --metrics "
    "gpu__time_duration.sum,dram__bytes_read.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "lts__t_sectors_srcunit_tex.sum,lts__t_sectors_srcunit_tex_lookup_hit.sum,"
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio "
    "python benchmarks/bench_l2_prefetch.py --ncu"
)


def kv_bytes(model: str, batch: int, context: int, itemsize: int = 2) -> int:
    """Bytes of K and V of one layer."""
    _, kv_heads, dim = MODELS[model]
    return batch * context * 2 * kv_heads * dim * itemsize


def floor_s(model: str, batch: int, context: int, bandwidth: float) -> float:
    """Seconds of one layer at full bandwidth: K, V, q, output and the index once."""
    heads, _, dim = MODELS[model]
    other = batch * (2 * heads * dim * 2 + context * 8)
    return (kv_bytes(model, batch, context) + other) / bandwidth


def roofline() -> list[dict[str, Any]]:
    """Floor in microseconds of every shape on every GPU of the table."""
    return [
        {
            "model": m,
            "batch": b,
            "context": n,
            "floor_us": {g.name: round(floor_s(m, b, n, g.bandwidth) * 1e6, 1) for g in load_table().gpus.values()},
        }
        for m, b, n in SHAPES
    ]


def print_roofline(rows: list[dict[str, Any]]) -> None:
    names = list(load_table().gpus)
    print("Floor in microseconds per layer, bf16, at the data sheet's bandwidth; nothing here is measured.")
    print(f"{'model':12} {'batch':>5} {'context':>7} " + " ".join(f"{n.replace('NVIDIA ', ''):>16}" for n in names))
    for r in rows:
        floors = " ".join(f"{r['floor_us'][n]:16.1f}" for n in names)
        print(f"{r['model']:12} {r['batch']:5} {r['context']:7} {floors}")


@dataclasses.dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indptr: torch.Tensor
    slots: torch.Tensor
    lengths: list[int]


def make_inputs(model: str, batch: int, context: int, seed: int) -> Inputs:
    """Scattered token slots, the worst case of a long-running server."""
    heads, kv_heads, dim = MODELS[model]
    g = torch.Generator(device="cuda").manual_seed(seed)
    count = batch * context
    make: Any = {"device": "cuda", "dtype": torch.bfloat16}
    k = torch.empty(count, kv_heads, dim, **make).normal_(generator=g)
    v = torch.empty_like(k).normal_(generator=g)
    q = torch.empty(batch, heads, dim, **make).normal_(generator=g)
    indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * context
    return Inputs(q, k, v, indptr, torch.randperm(count, device="cuda", generator=g), [context] * batch)


def ours(x: Inputs, tile: Tile, form: str, distance: int, pdl: bool) -> Callable[[], torch.Tensor]:
    """Our kernel with everything fixed beforehand."""
    from sglang_hicache_ext.kernels.l2_prefetch.attention import alloc_workspace, decode_attention
    from sglang_hicache_ext.kernels.l2_prefetch.check import DecodeParams, KvIndex
    from sglang_hicache_ext.kernels.l2_prefetch.schedule import schedule_from_counts

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    counts = split_counts(x.lengths, x.k.shape[1], sms, tile.block_tokens)
    schedule = schedule_from_counts(counts, distance, "cuda")
    out, work = torch.full_like(x.q, float("nan")), alloc_workspace(schedule.items, x.q.shape[1], x.q.shape[2], "cuda")
    plan = Plan(tile, counts, Prefetch(form, distance, pdl, ()), ())
    index, params = KvIndex(x.indptr, x.slots), DecodeParams(x.q.shape[2] ** -0.5)
    return lambda: decode_attention(x.q, x.k, x.v, index, params, plan=plan, schedule=schedule, out=out, workspace=work)


def expected(x: Inputs, request: int) -> torch.Tensor:
    """[heads, dim] float64 of one request."""
    rows = x.slots[int(x.indptr[request]) : int(x.indptr[request + 1])]
    group = x.q.shape[1] // x.k.shape[1]
    keys, values = (t[rows].double().repeat_interleave(group, 1) for t in (x.k, x.v))
    weights = (torch.einsum("hd,nhd->hn", x.q[request].double(), keys) * x.q.shape[2] ** -0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)


def error(x: Inputs, out: torch.Tensor) -> float:
    """Largest relative error of the first and last request; NaN counts as infinite."""
    worst = 0.0
    for b in {0, len(x.lengths) - 1}:
        want = expected(x, b)
        e = float((out[b].double() - want).norm() / want.norm())
        worst = max(worst, e if math.isfinite(e) else math.inf)
    return worst


def graph_us(calls: list[Callable[[], Any]]) -> tuple[float, float]:
    """Median microseconds of one call, twice; a CUDA graph rotates over the inputs."""
    from triton.testing import do_bench

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    twice = [do_bench(graph.replay, warmup=15, rep=30, return_mode="median") for _ in range(2)]
    return twice[0] * 1e3 / len(calls), twice[1] * 1e3 / len(calls)


def ceilings() -> dict[str, float]:
    """Copy and read bandwidth of this GPU in bytes per second."""
    from triton.testing import do_bench

    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    words = a.view(torch.int32)
    copy_ms = do_bench(lambda: b.copy_(a), warmup=20, rep=100, return_mode="median")
    read_ms = do_bench(lambda: words.sum(dtype=torch.int64), warmup=20, rep=100, return_mode="median")
    return {"copy": 2 * a.numel() / copy_ms * 1e3, "read": a.numel() / read_ms * 1e3}


def arms(model: str) -> list[tuple[Tile, str, int, bool]]:
    """Every (tile, form, distance, pdl); a distance not above the loop's own depth would name lines in flight."""
    heads, kv_heads, dim = MODELS[model]
    out = []
    for block, stages in TILES:
        tile = Tile("*", heads // kv_heads, dim, "bf16", block, stages, 4, 128, 0)
        out += [(tile, f, d, p) for f, d, p in PREFETCHES if not d or d > tile.depth or stages == 1]
    return out


def run_shape(model: str, batch: int, context: int, l2: int, ceiling: float, deadline: float) -> list[dict[str, Any]]:
    from l2_prefetch_peers import PEERS

    from sglang_hicache_ext.kernels.l2_prefetch.attention import launch_failures

    nbytes = kv_bytes(model, batch, context)
    copies = [make_inputs(model, batch, context, i) for i in range(max(1, math.ceil(L2_COPIES * l2 / nbytes)))]
    rows: list[dict[str, Any]] = []

    def measure(name: str, makers: list[Callable[[], Any]], **extra: Any) -> None:
        row: dict[str, Any] = {"model": model, "batch": batch, "context": context, "arm": name, **extra}
        if time.monotonic() > deadline:
            row["skipped"] = "budget spent"
        else:
            try:
                before = launch_failures()
                row["error"] = error(copies[0], makers[0]())
                if launch_failures() > before:
                    raise RuntimeError("the launch failed; the fallback is not what this arm measures")
                first, second = graph_us(makers)
                row |= {"us": first, "us_again": second, "bytes_per_s": nbytes / min(first, second) * 1e6}
                row["share_of_copy"] = row["bytes_per_s"] / ceiling
            except Exception as failed:  # a peer that cannot run a shape must not end the run
                row["skipped"] = repr(failed)[:200]
        rows.append(row)
        print(json.dumps(row), flush=True)

    for tile, form, distance, pdl in arms(model):
        makers = [ours(x, tile, form, distance, pdl) for x in copies]
        note = {"block": tile.block_tokens, "stages": tile.stages, "form": form, "distance": distance, "pdl": pdl}
        measure("ours", makers, **note)
    for name, make in PEERS.items():
        built = [make(x.q, x.k, x.v, x.indptr, x.slots, x.lengths) for x in copies]
        if any(isinstance(b, str) for b in built):
            rows.append({"model": model, "batch": batch, "context": context, "arm": name, "skipped": built[0]})
        else:
            measure(name, built)  # type: ignore[arg-type]
    return rows


def choose_rows(rows: list[dict[str, Any]], gpu: Gpu, source: str) -> list[Tile]:
    """The planner's rows: per model the tile and switch with the least time over its shapes.

    Prefetch is kept only when its gain exceeds 2 % and twice the noise, and no shape is slower than without.
    """
    from sglang_hicache_ext.kernels.l2_prefetch.aot import with_resources

    out = []
    for model, (heads, kv_heads, dim) in MODELS.items():
        mine = [r for r in rows if r["model"] == model and r["arm"] == "ours" and "us" in r and r["error"] < 6e-3]
        by_arm: dict[tuple[Any, ...], dict[tuple[int, int], dict[str, Any]]] = {}
        for r in mine:
            key = (r["block"], r["stages"], r["form"], r["distance"], r["pdl"])
            by_arm.setdefault(key, {})[r["batch"], r["context"]] = r
        shapes = {(b, n) for m, b, n in SHAPES if m == model}
        whole = {k: v for k, v in by_arm.items() if set(v) == shapes}
        base = {k: v for k, v in whole.items() if k[2] == "none"}
        if not base:
            continue
        off = min(base, key=lambda k: mean_log_us(base[k]))
        on = min(whole, key=lambda k: mean_log_us(whole[k]))
        noise = statistics.mean(abs(r["us"] / r["us_again"] - 1) for r in mine) * 100
        gain = (math.exp(mean_log_us(whole[off]) - mean_log_us(whole[on])) - 1) * 100
        never_slower = all(whole[on][s]["us"] <= whole[off][s]["us"] * (1 + noise / 100) for s in shapes)
        best = on if gain > max(MIN_GAIN_PERCENT, 2 * noise) and never_slower else off
        form, distance, pdl = best[2:] if best[2] != "none" else ("none", 0, False)
        text = f"{source}; noise {noise:.1f} %"
        filled = with_resources(Tile("*", 0, dim, "bf16", best[0], best[1], 4, 0, 0), gpu.sm)
        out.append(
            dataclasses.replace(
                filled,
                gpu=gpu.name,
                group=heads // kv_heads,
                form=form,
                distance=distance,
                pdl=pdl,
                gain_percent=round(gain, 2),
                measured=text,
            )
        )
    return out


def mean_log_us(by_shape: dict[tuple[int, int], dict[str, Any]]) -> float:
    return statistics.mean(math.log(min(r["us"], r["us_again"])) for r in by_shape.values())


def precompile(share: int, of: int) -> None:
    """Compile every ``of``-th arm into Triton's cache; serial compilation would take half the budget."""
    jobs = [(m, arm) for m in MODELS for arm in arms(m)]
    for i, (model, arm) in enumerate(jobs):
        if i % of == share:
            ours(make_inputs(model, 1, 1024, 0), *arm)()
    torch.cuda.synchronize()


def run_gpu(options: argparse.Namespace) -> dict[str, Any]:
    from sglang_hicache_ext.kernels.l2_prefetch.attention import device_gpu

    started = time.monotonic()
    command = [sys.executable, __file__, "--procs", str(options.procs), "--precompile"]
    children = [subprocess.Popen([*command, str(i)]) for i in range(options.procs)]
    for child in children:
        child.wait(timeout=options.budget)
    top = ceilings()
    gpu = dataclasses.replace(device_gpu(torch.device("cuda")), bandwidth=top["copy"])
    print(json.dumps({"gpu": dataclasses.asdict(gpu), "ceilings": top, "compiled_s": time.monotonic() - started}))
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        rows += run_shape(*shape, gpu.l2_bytes, top["copy"], started + options.budget)
        torch.cuda.empty_cache()
    source = f"{time.strftime('%Y-%m-%d')} bench_l2_prefetch.py, torch {torch.__version__}"
    table: Table = load_table().with_rows(gpu, choose_rows(rows, gpu, source))
    if options.table:
        Path(options.table).write_text(table.to_json())
    return {"gpu": dataclasses.asdict(gpu), "ceilings": top, "rows": rows, "table": json.loads(table.to_json())}


def ncu_target() -> None:
    """One launch per arm on the largest MHA shape, for the command in NCU."""
    x = make_inputs("llama-2-7b", 16, 4096, 0)
    for arm in arms("llama-2-7b"):
        ours(x, *arm)()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help="write the result as JSON")
    parser.add_argument("--table", default="", help="write the planner's table here")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds for everything")
    parser.add_argument("--procs", type=int, default=8, help="processes that compile")
    parser.add_argument("--roofline", action="store_true", help="print the floors only, also on a GPU")
    parser.add_argument("--ncu", action="store_true", help="what the ncu command runs")
    parser.add_argument("--precompile", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.precompile >= 0:
        return precompile(options.precompile, options.procs)
    if options.ncu:
        return ncu_target()
    floors = roofline()
    print_roofline(floors)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.platform()}
    result: dict[str, Any] = {"versions": versions, "roofline": floors, "kv_itemsize": KV_BYTES["bf16"]}
    if options.roofline or not torch.cuda.is_available():
        print("No GPU was used." if options.roofline else "No GPU here: floors only.")
    else:
        result |= run_gpu(options)
        print(f"DRAM bytes and L2 hit rate: {NCU}")
        print(json.dumps(result["table"], indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
