"""The real arm: one SGLang engine per policy over our NVMe store slowed by a latency model, then the same in simulation.

The delays scale with what recomputing a batch takes on this machine, so that the question (wait or recompute) is
the one that a GPU server with a remote store faces.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import BadInput, Goal, Measurement, Progress, Run, Sample, choices
from simulator.engine import simulate
from simulator.spec import NodeSpec
from simulator.trace import Load, Request

from policy_bench import ranking, simulated
from sglang_hicache_ext.keys import hash_chain, key_bytes
from sglang_hicache_ext.policy import PolicySettings
from sglang_hicache_ext.testing.latency import latency_model

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "tests" / "sglang_cpu"
PAGE_TOKENS = 16
LENGTHS = (1025, 2049, 3073)
LIMIT_S = 600.0
BATCH_TOKENS = 128 * PAGE_TOKENS
DELAYS = {"constant": 0.1, "heavy_tail": 0.1, "lognormal": 0.1}
"""Typical delay of a read, in units of what recomputing one full batch takes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine's engine does without a cache: TTFT = overhead + tokens / rate."""

    tokens_per_s: float
    overhead_s: float
    kv_bytes_per_token: int

    @property
    def batch_s(self) -> float:
        return BATCH_TOKENS / self.tokens_per_s


@dataclass(slots=True)
class Bench:
    """Paths and requests of the real run."""

    directory: Path
    seed: int
    requests: int
    pipeline: str
    prompts: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.prompts = [(self.seed * 100_003 + i, rng.choice(LENGTHS)) for i in range(self.requests)]

    def arrivals(self, gap_s: float) -> list[tuple[float, int, int]]:
        rng, now, made = random.Random(self.seed + 1), 0.0, []
        for seed, tokens in self.prompts:
            made.append((now, seed, tokens))
            now += rng.expovariate(1 / gap_s)
        return made


def compare_with_engine(run: Run, args: argparse.Namespace, policies: Sequence[str]) -> None:
    """Run both, print their difference, conclude whether they rank the policies alike."""
    stores = choices(args.real_stores, tuple(DELAYS), "--real-stores")
    bench = Bench(Path(args.real).resolve(), args.seed, args.real_requests, args.pipeline)
    if args.smoke:
        bench = Bench(bench.directory, args.seed, 4, args.pipeline)
        stores = stores[-1:]
    if bench.pipeline == "sglang" and "deadline" in policies:
        run.notes.append(
            "real run: deadline left out, SGLang's own pipeline does not know it; use --pipeline extension"
        )
        policies = [p for p in policies if p != "deadline"]
    progress = Progress(1 + len(policies))
    try:
        progress.step("real engine: measuring recompute, writing prompts")
        machine = _prepare(bench)
        controls = {store: _control(store, machine, args.seed) for store in stores}
        run.extra["real"] = {
            "machine": asdict(machine),
            "controls": controls,
            "seed": bench.seed,
            "requests": bench.requests,
            "pipeline": bench.pipeline,
        }
        for policy in policies:
            progress.step(f"real engine: {policy}")
            for store, answers in _replay(bench, machine, policy, controls).items():
                _record(run, bench, machine, policy, store, controls[store], answers)
    finally:
        progress.end()
    _judge(run, stores, policies)


def _prepare(bench: Bench) -> Machine:
    """Write every prompt once through our store; measure what computing costs."""
    measure = [(900_000 + i, n) for i, n in enumerate([512, *LENGTHS] * 2)]
    pages = sum(n // PAGE_TOKENS for _, n in bench.prompts)
    job = {
        "engine": _engine(bench, "best_effort", 0.0),
        "measure": measure,
        "write": bench.prompts,
        "expect_pages": pages,
    }
    lines = _run_child(bench, "prepare", job)
    times = [line["measured"] for line in lines if "measured" in line]
    written = next((line["written"] for line in lines if "written" in line), 0)
    if written < pages:
        raise RuntimeError(f"only {written} of {pages} pages were written; see {bench.directory}/prepare.log")
    slope, overhead = np.polyfit([t[0] for t in times], [t[1] for t in times], 1)
    return Machine(float(1 / slope), max(0.0, float(overhead)), 4 * 2 * 64 * 2 * 2)


def _control(store: str, machine: Machine, seed: int) -> dict[str, Any]:
    model: dict[str, Any] = {"kind": store, "seed": seed, "base_s": DELAYS[store] * machine.batch_s}
    if store != "constant":
        model["cap_s"] = 10 * machine.batch_s
    return {"model": model, "bandwidth_Bps": 5 * machine.tokens_per_s * machine.kv_bytes_per_token}


def _replay(
    bench: Bench, machine: Machine, policy: str, controls: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    requests = bench.arrivals(_gap_s(machine))
    steps = [{"name": s, "control": c, "requests": requests} for s, c in controls.items()]
    job = {
        "engine": _engine(bench, policy, machine.tokens_per_s),
        "replays": steps,
        "control": str(_control_file(bench)),
    }
    lines = _run_child(bench, policy, job)
    return {line["replayed"]: line["answers"] for line in lines if "replayed" in line}


def _gap_s(machine: Machine) -> float:
    """Recomputing everything would keep the engine busy for three quarters of the time."""
    return (machine.overhead_s + float(np.mean(LENGTHS)) / machine.tokens_per_s) / 0.75


def _record(
    run: Run,
    bench: Bench,
    machine: Machine,
    policy: str,
    store: str,
    control: dict[str, Any],
    answers: list[dict[str, Any]],
) -> None:
    """One sample of the real run and one of its simulation."""
    failed = [a["error"] for a in answers if "error" in a]
    good = [a for a in answers if "error" not in a]
    real = Measurement(
        values={
            "hit_tokens_used": float(sum(a["storage_tokens"] for a in good)),
            "ttft_p50_s": float(np.median([a["ttft_s"] for a in good])),
            "ttft_p99_s": float(np.percentile([a["ttft_s"] for a in good], 99)),
        },
        series={"ttft_s": [a["ttft_s"] for a in good]},
    )
    columns = simulate(
        load_of(bench, machine), node_of(machine, control), latency_model(control["model"]), policy, settings()
    )
    ttft = [columns.ttft_s[i] for i in sorted(columns.ttft_s)]
    twin = Measurement(values=columns.table(), series={"ttft_s": ttft})
    for case, found, error in (
        (f"real engine / {store}", real, "; ".join(failed)),
        (f"its simulation / {store}", twin, ""),
    ):
        run.samples.append(Sample(case, policy, 0, 0, 0.0, 0.0, found.values, found.series, found.facts, error))
    run.failures += [f"real engine, {policy}, {store}: {f}" for f in failed]


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
        query_s=0.002,
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


def _control_file(bench: Bench) -> Path:
    return bench.directory / "slow.json"


def _engine(bench: Bench, policy: str, tokens_per_s: float) -> dict[str, Any]:
    """Arguments of the engine: our backend, slowed, through ``dynamic``."""
    kit = _kit()
    model = bench.directory / "model"
    if not (model / "config.json").exists():
        import models

        models.write_model("tiny", str(model))
    extra: dict[str, Any] = {
        "backend_name": "nvme",
        "module_path": "slow_backend",
        "class_name": "SlowHiCacheExtStorage",
        "interface_v1": 1,
        "path": str(bench.directory / "store"),
        "capacity": "2GiB",
        "prefetch_threshold": 256,
        "pipeline": bench.pipeline,
    }
    if bench.pipeline == "extension":
        extra |= {"prefetch_policy": policy, "prefill_tokens_per_s": tokens_per_s}
    arguments = kit.engine_arguments(str(model), page_size=PAGE_TOKENS, max_total_tokens=16384, max_running_requests=8)
    storage = kit.storage_arguments("dynamic", "page_first_direct", extra)
    storage |= {
        "hicache_ratio": 4.0,
        "hicache_storage_prefetch_policy": "timeout" if policy == "deadline" else policy,
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
    return {**arguments, **storage}


def _kit() -> Any:
    if not KIT.is_dir():
        raise BadInput("--real needs the repository: the CPU stand-ins lie in tests/sglang_cpu")
    if str(KIT) not in sys.path:
        sys.path.append(str(KIT))
    import engine_kit

    return engine_kit


def _run_child(bench: Bench, name: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one engine to its end; its lines. Raises RuntimeError when it did not finish."""
    kit = _kit()
    path = f"{KIT / 'site'}:{ROOT / 'benchmarks'}"
    env = kit.environment("tiny", PYTHONPATH=path, HICACHE_BENCH_SLOW=str(_control_file(bench)))
    job_file, log = bench.directory / f"{name}.json", bench.directory / f"{name}.log"
    job_file.write_text(json.dumps(job))
    command = [sys.executable, str(Path(__file__).with_name("engine_child.py")), str(job_file)]
    with open(log, "w") as log_file:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log_file, text=True, env=env, start_new_session=True
        )
        watchdog = threading.Timer(LIMIT_S, kit.end_group, [child])
        watchdog.start()
        try:
            lines = [json.loads(t[4:]) for t in child.stdout or () if t.startswith("HCX ")]
            child.wait(30)
        finally:
            watchdog.cancel()
            kit.end_group(child)
    if not any("done" in line for line in lines):
        raise RuntimeError(f"the engine ended early; the end of {log}:\n{kit.tail(log)}")
    return lines
