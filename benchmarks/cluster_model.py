"""How many drives and how much network a trace needs: a simulated cluster, calibrated by measured results.

    python benchmarks/cluster_model.py --trace conversation_trace.jsonl --nodes 4 --copies 4 \\
        --drive storage.json --network remote.json --check policies.json

Every assumption is printed. ``--check`` simulates the requests of a real run (compare_policies --real DIR --json) on
one node and prints the error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from harness import BadInput, Measurement, Plot, Progress, Run, Sample, entry, parser, positive
from policy_bench import check, simulated
from simulator.calibrate import with_drive, with_network
from simulator.cluster import ClusterResult, ClusterSpec, copies, simulate_cluster
from simulator.spec import NodeSpec
from simulator.trace import Load

GBIT = 1e9 / 8
ENOUGH = 0.9
"""A configuration is enough when it keeps this part of what an infinitely fast L3 would save."""
COLUMNS = ("ttft_p50_s", "ttft_p99_s", "gpu_busy_s", "drive_gb_s", "network_gb_s", "drive_busy", "network_busy")


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__ or "", rounds=1)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    node = NodeSpec()
    made.add_argument("--trace", metavar="FILE", default="", help="without it: generated multi-turn conversations")
    made.add_argument("--requests", type=int, default=0, help="use the first so many; 0 for all")
    made.add_argument("--nodes", type=positive, default=4)
    made.add_argument(
        "--copies", type=positive, default=0, help="independent copies of the load at once; as many as nodes"
    )
    made.add_argument("--drives", default="0,1,2,4", help="drives per node to try")
    made.add_argument(
        "--nics-gbit", default="0,25,100,400", help="network per node to try, Gbit/s; 0 for no remote tier"
    )
    made.add_argument("--remote-gb-s", type=float, default=50.0, help="what the remote tier delivers in all")
    made.add_argument("--policy", choices=simulated.POLICIES, default="deadline")
    made.add_argument("--prefill-tokens-per-s", type=float, default=node.prefill_tokens_per_s)
    made.add_argument("--kv-bytes-per-token", type=int, default=node.kv_bytes_per_token)
    made.add_argument("--l2-tokens", type=int, default=node.l2_tokens)
    made.add_argument("--drive", metavar="JSON", default="", help="result of bench_storage")
    made.add_argument("--network", metavar="JSON", default="", help="result of bench_remote")
    made.add_argument("--check", metavar="JSON", default="", help="result of compare_policies --real")
    args = made.parse_args(argv)
    args.copies = args.copies or args.nodes
    return args


def numbers(text: str, option: str) -> list[float]:
    try:
        found = [float(t) for t in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise BadInput(f"{option} is {text!r}; write numbers, 0 or more, with commas")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    drives, nics = numbers(args.drives, "--drives"), numbers(args.nics_gbit, "--nics-gbit")
    run = Run("cluster_model", None, vars(args), args.seed, args.smoke, COLUMNS)
    spec, load = spec_of(args, run), load_of(args)
    state_assumptions(run, spec, load)
    if args.check:
        check.check_single_node(run, args.check)
    results = sweep(run, args, spec, load, drives, nics)
    answer(run, args, results)
    return run.finish(args.json, args.report, args.plots)


def spec_of(args: argparse.Namespace, run: Run) -> ClusterSpec:
    node = NodeSpec(
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        kv_bytes_per_token=args.kv_bytes_per_token,
        l2_tokens=args.l2_tokens,
    )
    spec = ClusterSpec(nodes=args.nodes, node=node, remote_Bps=args.remote_gb_s * 1e9, nic_Bps=400 * GBIT)
    for path, calibrate in ((args.drive, with_drive), (args.network, with_network)):
        if path:
            spec, words = calibrate(spec, path)
            run.notes += words
    return spec


def load_of(args: argparse.Namespace) -> Load:
    load = simulated.chosen_loads([] if args.trace else ["multi_turn"], args.trace, args.seed, args.smoke)[0]
    if args.requests:
        load = load.head(args.requests)
    return copies(load, args.copies)


def state_assumptions(run: Run, spec: ClusterSpec, load: Load) -> None:
    """Everything the answer rests on."""
    node = spec.node
    run.notes += [
        f"load: {len(load.requests)} requests, {load.input_tokens / max(1.0, load.duration_s):,.0f} input tokens/s, {load.source}",
        f"{spec.nodes} nodes of {node.prefill_tokens_per_s:,.0f} prefill tokens/s, {node.kv_bytes_per_token:,} KV bytes a token, "
        f"L1 {node.l1_tokens:,} and L2 {node.l2_tokens:,} tokens; decode runs elsewhere",
        f"a drive reads {spec.drive_read_Bps / 1e9:.2f} and writes {spec.drive_write_Bps / 1e9:.2f} GB/s, holds "
        f"{spec.drive_bytes / 1e12:.1f} TB, first byte after {spec.drive_delay_s * 1e3:.1f} ms; drives of a node add up; reads and writes "
        "do not slow each other",
        f"the remote tier delivers {spec.remote_Bps / 1e9:.0f} GB/s in all, first byte after {spec.remote_delay_s * 1e3:.1f} ms; NICs are full "
        "duplex and carry nothing else; every computed page is written to both tiers at once",
        "the router follows the longest known prefix unless that node has 65,536 tokens more to do than the idlest",
    ]
    run.extra["load"] = load.source


def sweep(
    run: Run, args: argparse.Namespace, spec: ClusterSpec, load: Load, drives: Sequence[float], nics: Sequence[float]
) -> dict[tuple[int, float], ClusterResult]:
    """One simulation per (drives, Gbit/s), and the two bounds: no L3, and one without limits."""
    endless = replace(
        spec, drives=1, drive_read_Bps=1e15, drive_delay_s=0.0, nic_Bps=1e15, remote_Bps=1e18, remote_delay_s=0.0
    )
    plan: dict[str, ClusterSpec] = {"no L3": replace(spec, drives=0, nic_Bps=0.0), "endless L3": endless}
    keys: dict[str, tuple[int, float]] = {}
    for count in drives:
        for gbit in nics:
            if count or gbit:
                name = f"{count:g} drives, {gbit:g} Gbit/s"
                keys[name] = (int(count), gbit)
                node = replace(spec.node, l3_write_Bps=max(1, count) * spec.drive_write_Bps)
                plan[name] = replace(spec, drives=int(count), nic_Bps=min(gbit * GBIT, spec.nic_Bps), node=node)
    progress, found = Progress(len(plan)), {}
    for name, cluster in plan.items():
        progress.step(name)
        result = simulate_cluster(load, cluster, args.policy)
        run.samples.append(Sample("cluster", name, 0, 0, 0.0, 0.0, _values(result, load), {}, {}, ""))
        if name in keys:
            found[keys[name]] = result
    progress.end()
    return found


def _values(result: ClusterResult, load: Load) -> dict[str, float]:
    seconds = max(1.0, load.duration_s)
    return Measurement(
        values={
            "ttft_p50_s": float(np.percentile(result.ttft_s, 50)),
            "ttft_p99_s": float(np.percentile(result.ttft_s, 99)),
            "gpu_busy_s": result.gpu_busy_s,
            "drive_gb_s": result.drive_bytes / seconds / 1e9,
            "network_gb_s": result.network_bytes / seconds / 1e9,
            "drive_busy": result.drive_busy,
            "network_busy": result.network_busy,
            "stored_tb": result.stored_bytes / 1e12,
        }
    ).values


def answer(run: Run, args: argparse.Namespace, results: dict[tuple[int, float], ClusterResult]) -> None:
    """The smallest configuration that keeps most of what L3 can give; fewer drives first, then less network."""
    for metric, name in (("gpu_busy_s", "prefill time"), ("ttft_p50_s", "TTFT p50")):
        worst, best = (run.median("cluster", bound, metric) or 0.0 for bound in ("no L3", "endless L3"))
        limit = worst - ENOUGH * (worst - best)
        enough = [key for key in sorted(results) if _median(run, key, metric) <= limit]
        gain = f"{name}: {worst:.4g} s without L3, {best:.4g} s with an endless one"
        if worst <= best:
            run.notes.append(f"{gain}: L3 is not worth it for this load")
        elif enough:
            least = {count: min(g for c, g in enough if c == count) for count in sorted({c for c, _ in enough})}
            words = " or ".join(f"{count} drives with {gbit:g} Gbit/s" for count, gbit in least.items())
            run.notes.append(f"{gain}; {ENOUGH:.0%} of that gain needs, per node, {words}")
        else:
            run.notes.append(f"{gain}; nothing that was tried keeps {ENOUGH:.0%} of that gain")
        run.conclude(f"drives_for_{metric}", float(enough[0][0]) if enough else None)
        run.conclude(f"gbit_for_{metric}", enough[0][1] if enough else None)
    run.plots.append(_plot(run, results))


def _median(run: Run, key: tuple[int, float], metric: str) -> float:
    return run.median("cluster", f"{key[0]:g} drives, {key[1]:g} Gbit/s", metric) or 0.0


def _plot(run: Run, results: dict[tuple[int, float], ClusterResult]) -> Plot:
    nics = sorted({gbit for _, gbit in results})
    series = {
        f"{count} drives a node": [
            (float(nics.index(g)), v, v, v)
            for d, g in sorted(results)
            if d == count and (v := _median(run, (d, g), "ttft_p50_s"))
        ]
        for count in sorted({d for d, _ in results})
    }
    bound = run.median("cluster", "no L3", "ttft_p50_s") or 0.0
    title = "Median TTFT by drives and network of a node"
    return Plot(
        title, "network, Gbit/s a node", "TTFT p50, s", series, [f"{n:g}" for n in nics], level=(bound, "no L3")
    )


if __name__ == "__main__":
    raise SystemExit(entry(main))
