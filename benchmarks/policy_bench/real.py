"""The real arm: one SGLang engine over our NVMe store slowed by a latency model, then the same in simulation.

The delays scale with what recomputing a batch takes on this machine, so that the question (wait or recompute) is
the one that a GPU server with a remote store faces.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Goal, Progress, Run, Sample, WarmRead, choices
from simulator.engine import simulate
from simulator.spec import NodeSpec
from simulator.trace import Load, Request

from policy_bench import ranking, simulated
from policy_bench.engine import FULL_SPEED, KV_BYTES_PER_TOKEN, LENGTHS, PAGE_TOKENS, Bench, Engine, EngineEnded
from sglang_hicache_ext.keys import hash_chain, key_bytes
from sglang_hicache_ext.policy import PolicySettings
from sglang_hicache_ext.testing.latency import latency_model

BATCH_TOKENS = 128 * PAGE_TOKENS
MODELS: dict[str, dict[str, float]] = {
    "constant": {"base_s": 0.1},
    "heavy_tail": {"base_s": 0.1, "cap_s": 10.0},
    "lognormal": {"base_s": 0.1, "cap_s": 10.0},
    "stall": {"base_s": 0.1, "stall_s": 2.0, "every_s": 8.0},
    "shared_bandwidth": {"base_s": 0.1, "period_s": 10.0},
}
"""Times of the latency models, in units of what recomputing one full batch takes."""
PLAIN = {"shared_bandwidth": {"low": 0.1, "duty": 0.4}}
"""Shares: with a tenth of the bandwidth, loading takes twice as long as recomputing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine's engine does: TTFT without a cache = overhead + tokens / rate; a hit at full speed adds ``hit_s``."""

    tokens_per_s: float
    overhead_s: float
    hit_s: float
    kv_bytes_per_token: int

    @property
    def batch_s(self) -> float:
        return BATCH_TOKENS / self.tokens_per_s


def compare_with_engine(run: Run, args: argparse.Namespace, policies: Sequence[str]) -> None:
    """Run both, print their difference, conclude whether they rank the policies alike."""
    stores = choices(args.real_stores, tuple(MODELS), "--real-stores")
    bench = Bench(Path(args.real).resolve(), args.seed, 4 if args.smoke else args.real_requests)
    rounds = 1 if args.smoke else args.real_rounds
    progress = Progress(2 + rounds * len(policies) * len(stores))
    progress.step("real engine: starting")
    try:
        with Engine(bench) as engine:
            progress.step("real engine: measuring recompute, writing prompts")
            machine = _prepare(bench, engine)
            controls = {store: _control(store, machine, args.seed) for store in stores}
            run.extra["real"] = {
                "machine": asdict(machine),
                "controls": controls,
                "seed": bench.seed,
                "requests": bench.requests,
            }
            meter = Meter(engine, first_seed=950_000)
            for number in range(rounds):
                for store, policy in itertools.product(stores, policies):
                    progress.step(f"real engine: {policy}, {store}, round {number + 1}/{rounds}")
                    meter.measure()
                    _record(run, policy, store, number, _replay(bench, machine, engine, policy, controls[store]))
            machine = meter.machine(machine.hit_s)
            run.extra["real"]["machine"] = asdict(machine)
    except (WarmRead, EngineEnded) as e:
        run.fail(e)
        return
    finally:
        progress.end()
    for store, policy in itertools.product(stores, policies):
        _simulate(run, bench, machine, policy, store, controls[store])
    _judge(run, stores, policies)


class Meter:
    """Recompute times of fresh prompts, taken again and again because a shared machine changes its pace."""

    def __init__(self, engine: Engine, first_seed: int = 900_000) -> None:
        self._engine, self._seed = engine, first_seed
        self._times: dict[int, list[float]] = {n: [] for n in LENGTHS}

    def measure(self, repeats: int = 1) -> None:
        prompts = [(self._seed + i, n) for i, n in enumerate([*LENGTHS] * repeats)]
        self._seed += len(prompts)
        for tokens, seconds in self._engine.step({"measure": prompts})["measured"]:
            self._times[tokens].append(seconds)

    def machine(self, hit_s: float) -> Machine:
        """Fit a line through the medians; half of the shortest time is the most that counts as overhead."""
        medians = [float(np.median(self._times[n])) for n in LENGTHS]
        slope, overhead = np.polyfit(LENGTHS, medians, 1)
        return Machine(float(1 / slope), min(max(0.0, float(overhead)), medians[0] / 2), hit_s, KV_BYTES_PER_TOKEN)


def _prepare(bench: Bench, engine: Engine) -> Machine:
    """Measure what computing and what a hit costs; write every prompt once through our store."""
    meter = Meter(engine)
    meter.measure(repeats=3)
    pages = sum(n // PAGE_TOKENS for _, n in bench.prompts)
    written = engine.step({"write": bench.prompts, "pages": pages})["written"]
    if written < pages:
        raise EngineEnded(f"only {written} of {pages} pages were written; see {engine.log}")
    full_speed = {**FULL_SPEED, "config": {"prefetch_policy": "wait_complete"}}
    apart = [(2.0 * i, seed, n) for i, (seed, n) in enumerate(bench.prompts[:5])]
    hits = [a["ttft_s"] for a in engine.step({"control": full_speed, "replay": apart})["answers"] if "error" not in a]
    computing = meter.machine(0.0)
    return replace(computing, hit_s=max(0.001, float(np.median(hits)) - computing.overhead_s))


def _control(store: str, machine: Machine, seed: int) -> dict[str, Any]:
    times = {name: value * machine.batch_s for name, value in MODELS[store].items()}
    model = {"kind": store, "seed": seed, **times, **PLAIN.get(store, {})}
    return {"model": model, "bandwidth_Bps": 5 * machine.tokens_per_s * machine.kv_bytes_per_token}


def _replay(
    bench: Bench, machine: Machine, engine: Engine, policy: str, control: dict[str, Any]
) -> list[dict[str, Any]]:
    config = {"prefetch_policy": policy, "prefill_tokens_per_s": machine.tokens_per_s}
    step = {"control": {**control, "config": config}, "replay": bench.arrivals(_gap_s(machine))}
    return list(engine.step(step)["answers"])


def _gap_s(machine: Machine) -> float:
    """Recomputing everything would keep the engine busy for three quarters of the time."""
    return (machine.overhead_s + float(np.mean(LENGTHS)) / machine.tokens_per_s) / 0.75


def _record(run: Run, policy: str, store: str, number: int, answers: list[dict[str, Any]]) -> None:
    """One sample of the real run; a failed request is part of it."""
    failed = [a["error"] for a in answers if "error" in a]
    good = [a for a in answers if "error" not in a]
    warm = sum(a["cached_tokens"] > a["storage_tokens"] for a in good)
    if warm:
        raise WarmRead(f"{policy}, {store}: {warm} prompts were in the GPU's or the host's cache before the replay")
    ttft = [a["ttft_s"] for a in good]
    values = {
        "ttft_p50_s": float(np.median(ttft)) if ttft else float("nan"),
        "ttft_p99_s": float(np.percentile(ttft, 99)) if ttft else float("nan"),
        "hit_tokens_used": float(sum(a["storage_tokens"] for a in good)),
    }
    error = "; ".join(failed)
    run.samples.append(
        Sample(f"real engine / {store}", policy, number, 0, 0.0, 0.0, values, {"ttft_s": ttft}, {}, error)
    )
    run.failures += [f"real engine, {policy}, {store}: {f}" for f in failed]


def _simulate(run: Run, bench: Bench, machine: Machine, policy: str, store: str, control: dict[str, Any]) -> None:
    """The same requests, page keys, delays and rates in simulation."""
    model, node = latency_model(control["model"]), node_of(machine, control)
    columns = simulate(load_of(bench, machine), node, model, policy, settings())
    ttft = [columns.ttft_s[i] for i in sorted(columns.ttft_s)]
    run.samples.append(
        Sample(f"its simulation / {store}", policy, 0, 0, 0.0, 0.0, columns.table(), {"ttft_s": ttft}, {}, "")
    )


def settings() -> PolicySettings:
    """Numbers of the policies in the simulated twin."""
    return PolicySettings(page_tokens=PAGE_TOKENS)


def load_of(bench: Bench, machine: Machine) -> Load:
    """The same requests with the same page ids: the first eight bytes of SGLang's page keys."""
    from policy_bench.engine_child import prompt_ids

    requests, stored = [], []
    for arrival, seed, tokens in bench.arrivals(_gap_s(machine)):
        hashes = hash_chain(prompt_ids(seed, tokens), PAGE_TOKENS)
        pages = [int.from_bytes(key_bytes(h)[:8], "little") for h in hashes]
        stored += pages
        requests.append(Request(arrival, tokens, 1, (*pages, -1 - seed)))
    return Load("real", PAGE_TOKENS, tuple(requests), tuple(stored))


def node_of(machine: Machine, control: dict[str, Any]) -> NodeSpec:
    """The simulated twin of the engine over the slowed store."""
    return NodeSpec(
        prefill_tokens_per_s=machine.tokens_per_s,
        prefill_overhead_s=machine.overhead_s,
        kv_bytes_per_token=machine.kv_bytes_per_token,
        l1_tokens=16384,
        l2_tokens=65536,
        l3_read_Bps=control["bandwidth_Bps"],
        load_back_Bps=1e12,
        query_s=machine.hit_s,
        first_batch_tokens=16 * PAGE_TOKENS,
        batch_tokens=BATCH_TOKENS,
        poll_s=0.002,
    )


def _judge(run: Run, stores: Sequence[str], policies: Sequence[str]) -> None:
    pairs = agreeing = 0
    for store in stores:
        cases = (f"real engine / {store}", f"its simulation / {store}")
        real, twin = ({p: simulated.ttft_of(run, c, p) for p in policies} for c in cases)
        found = ranking.compare(real, twin, run.seed)
        run.notes += [f"{store}: {line}" for line in found.lines]
        run.notes.append(f"{store}: {found.agreeing} of {found.pairs} pairs with disjoint intervals ranked alike")
        pairs, agreeing = pairs + found.pairs, agreeing + found.agreeing
    run.conclude(
        "rank_agreement",
        agreeing / pairs if pairs else None,
        Goal(">=", 1.0, "policy pairs that simulator and real run rank alike, where intervals are disjoint in both"),
    )
