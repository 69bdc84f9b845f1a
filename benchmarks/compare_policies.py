"""Which prefetch policy for which load and store: in simulation, and over a real SGLang engine.

    python benchmarks/compare_policies.py                                     generated loads, simulated
    python benchmarks/compare_policies.py --trace conversation_trace.jsonl    a Mooncake-style trace as well
    python benchmarks/compare_policies.py --real DIR                          a real engine (CPU) over a slowed store too

The simulator calls the policy functions that the pipeline calls. A trace is never shipped; its SHA-256 is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from harness import Goal, Run, choices, entry, parser, positive, writable_directory
from policy_bench import real, simulated
from simulator.infinite import simulated_hit_rate
from simulator.spec import NodeSpec
from simulator.trace import Load, hit_rate_infinite

TRACE_LIMIT_S = 20.0


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__ or "", rounds=1)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    node = NodeSpec()
    made.add_argument("--trace", metavar="FILE", default="", help="JSON lines: timestamp, input_length, hash_ids, ...")
    made.add_argument("--loads", default=",".join(simulated.LOADS), help="generated loads, '' for none")
    made.add_argument("--stores", default=",".join(simulated.STORES), help="latency models of the store")
    made.add_argument("--policies", default=",".join(simulated.POLICIES))
    made.add_argument("--prefill-tokens-per-s", type=float, default=node.prefill_tokens_per_s)
    made.add_argument("--kv-bytes-per-token", type=int, default=node.kv_bytes_per_token)
    made.add_argument("--l3-gb-s", type=float, default=node.l3_read_Bps / 1e9, help="read bandwidth of L3")
    made.add_argument("--l2-tokens", type=int, default=node.l2_tokens)
    made.add_argument("--servers", type=int, default=node.servers, help="prefill servers behind one host cache")
    made.add_argument("--sglang-order", action="store_true", help="SGLang's I/O: one worker, whole requests in turn")
    made.add_argument("--real", metavar="DIR", default="", help="also run a real SGLang engine; its store lies here")
    made.add_argument(
        "--real-requests", type=positive, default=32, help="requests of the real run per store and policy"
    )
    made.add_argument(
        "--real-stores", default=",".join(simulated.STORES), help="latency models of the real run's store"
    )
    made.add_argument("--real-rounds", type=positive, default=1, help="rounds of the real run")
    return made.parse_args(argv)


def node_of(args: argparse.Namespace) -> NodeSpec:
    """Raises ConfigError for numbers that cannot be."""
    node = NodeSpec(
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        kv_bytes_per_token=args.kv_bytes_per_token,
        l3_read_Bps=args.l3_gb_s * 1e9,
        l2_tokens=args.l2_tokens,
        servers=args.servers,
    )
    return replace(node, io_workers=1, is_fair=False) if args.sglang_order else node


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    policies = choices(args.policies, simulated.POLICIES, "--policies")
    stores = choices(args.stores, simulated.STORES, "--stores")
    names = choices(args.loads, simulated.LOADS, "--loads") if args.loads else []
    spec, loads = node_of(args), simulated.chosen_loads(names, args.trace, args.seed, args.smoke)
    matrix = simulated.Matrix(spec, loads, stores, policies, args.seed)
    run = Run(
        "compare_policies",
        path=writable_directory(args.real, "--real") if args.real else None,
        requested=vars(args),
        seed=args.seed,
        is_smoke=args.smoke,
        columns=simulated.COLUMNS,
    )
    describe(run, spec, loads)
    if simulated.run_matrix(run, matrix):
        conclude(run, matrix, bool(args.trace))
        if args.real:
            real.compare_with_engine(run, args, policies)
    return run.finish(args.json, args.report, args.plots)


def describe(run: Run, spec: NodeSpec, loads: Sequence[Load]) -> None:
    """Say what is assumed, and whether L3 can be worth it at all."""
    run.extra["loads"] = {load.name: load.source for load in loads}
    run.notes += [f"load {load.name}: {len(load.requests)} requests, {load.source}" for load in loads]
    ratio = spec.l3_read_Bps / spec.break_even_Bps
    verdict = "worth it" if ratio > 1 else "NOT worth it: loading a token takes longer than computing it"
    run.notes.append(
        f"L3 reads {spec.l3_read_Bps / 1e9:.1f} GB/s, break-even for this model is {spec.break_even_Bps / 1e9:.1f} GB/s: {verdict}"
    )
    run.notes.append(
        "simulated: prefill linear in tokens, decode elsewhere, write-through to L3 with its own bandwidth, one query thread"
    )


def conclude(run: Run, matrix: simulated.Matrix, has_trace: bool) -> None:
    """Winners, the goals of ``deadline``, and the checks of the simulator."""
    cases = [case for case, _, _ in matrix.cases]
    run.notes += [simulated.winners(run, case, matrix.policies) for case in cases]
    run.plots += simulated.plots(run, matrix)
    ratios = {c: r for c in cases if (r := simulated.deadline_ratio(run, c, matrix.policies)) is not None}
    run.extra["deadline_vs_best"] = ratios
    tails = [r for c, r in ratios.items() if c.endswith("heavy_tail")]
    run.conclude(
        "deadline_vs_best_max",
        max(ratios.values(), default=None),
        Goal("<=", 1.05, "TTFT p50 of deadline over the best other policy, worst case"),
    )
    run.conclude(
        "deadline_vs_best_heavy_tail",
        max(tails, default=None),
        Goal("<=", 0.999, "the same on the heavy tail, worst load"),
    )
    if has_trace:
        load = matrix.loads[0]
        found, ideal = simulated_hit_rate(load), hit_rate_infinite(load.requests)
        run.notes.append(f"hit rate with infinite capacity: simulated {found:.4%}, counted {ideal:.4%}")
        if abs(found - ideal) > 1e-4:
            run.failures.append(f"the simulator hits {found:.4%} where {ideal:.4%} are there")
        run.conclude("hit_rate_infinite", found)
        seconds = max(s for c, s in matrix.cpu_s.items() if c.startswith(load.name))
        run.conclude("trace_sim_cpu_s", seconds, Goal("<=", TRACE_LIMIT_S, "CPU seconds, the trace under all policies"))


if __name__ == "__main__":
    raise SystemExit(entry(main))
