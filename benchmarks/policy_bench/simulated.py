"""The simulated arm: every policy over every load and store, as arms of the harness."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from harness import Arm, Measurement, Plot, Run, Trial
from simulator.engine import simulate
from simulator.loads import MultiTurn, SharedPrompt
from simulator.spec import NodeSpec
from simulator.trace import Load, read_trace

from sglang_hicache_ext.policy import PolicyName
from sglang_hicache_ext.testing.latency import LatencyModel, describe, latency_model

NO_L3 = "no_l3"
POLICIES = [str(p) for p in PolicyName]
STORES = ("constant", "heavy_tail", "stall", "shared_bandwidth")
LOADS = ("multi_turn", "shared_prompt")
COLUMNS = (
    "ttft_p50_s",
    "ttft_p99_s",
    "hit_tokens_used",
    "tokens_thrown_away",
    "gpu_s_recomputed",
    "deadline_misses",
    "host_page_s",
)
SMOKE_REQUESTS = 250


@dataclass(slots=True)
class Matrix:
    """What is simulated, and how long the trace took.

    Attributes:
        cpu_s: processor seconds per case, all policies together.
    """

    spec: NodeSpec
    loads: Sequence[Load]
    stores: Sequence[str]
    policies: Sequence[str]
    seed: int
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def cases(self) -> list[tuple[str, Load, LatencyModel]]:
        return [
            (case_name(load.name, store), load, latency_model({"kind": store, "seed": self.seed}))
            for load in self.loads
            for store in self.stores
        ]


def case_name(load: str, store: str) -> str:
    return f"{load} / {store}"


def chosen_loads(names: Sequence[str], trace: str, seed: int, is_smoke: bool) -> list[Load]:
    """Build the generated loads and read the trace. Raises ConfigError for a bad trace."""
    made = {"multi_turn": lambda: MultiTurn(seed=seed).load(), "shared_prompt": lambda: SharedPrompt(seed=seed).load()}
    loads = [made[name]() for name in names]
    if trace:
        loads.insert(0, read_trace(trace))
    return [load.head(SMOKE_REQUESTS) for load in loads] if is_smoke else loads


def run_matrix(run: Run, matrix: Matrix) -> bool:
    """Run every case; a trial is exact, so one round is enough. False when the run must stop."""
    for case, load, model in matrix.cases:
        arms = [_arm(matrix, load, model, policy, case) for policy in (NO_L3, *matrix.policies)]
        if not run.measure(case, arms, rounds=1, warm_up=0):
            return False
    return True


def _arm(matrix: Matrix, load: Load, model: LatencyModel, policy: str, case: str) -> Arm:
    def simulated(_trial: Trial) -> Measurement:
        started = time.process_time()
        columns = run_policy(load, matrix.spec, model, policy)
        if policy != NO_L3:
            matrix.cpu_s[case] = matrix.cpu_s.get(case, 0.0) + time.process_time() - started
        ttft = [round(columns.ttft_s[i], 5) for i in sorted(columns.ttft_s)]
        return Measurement(values=columns.table(), series={"ttft_s": ttft})

    asked: dict[str, Any] = {"policy": policy, "node": asdict(matrix.spec)}
    in_use = {"load": load.source, "store": describe(model), "policy": policy}
    return Arm(policy, simulated, asked, lambda: in_use, is_required=True)


def run_policy(load: Load, spec: NodeSpec, model: LatencyModel, policy: str) -> Any:
    """One simulation; ``no_l3`` is a node whose threshold no hit can reach."""
    if policy == NO_L3:
        return simulate(load, replace(spec, threshold_tokens=1 << 50), model, "best_effort")
    return simulate(load, spec, model, policy)


def deadline_ratio(run: Run, case: str, policies: Sequence[str]) -> float | None:
    """TTFT p50 of ``deadline`` over the best of the others in one case."""
    found = {p: run.median(case, p, "ttft_p50_s") for p in policies}
    own = found.pop("deadline", None)
    others = [v for v in found.values() if v is not None]
    return own / min(others) if own and others else None


def winners(run: Run, case: str, policies: Sequence[str]) -> str:
    """One line: which policy wins this case, by median and by tail, and what the medians' intervals say."""
    parts = []
    for metric, name in (("ttft_p50_s", "TTFT p50"), ("ttft_p99_s", "p99"), ("gpu_s_recomputed", "GPU s recomputed")):
        ranked = sorted((run.median(case, p, metric) or 0.0, p) for p in policies)
        parts.append(f"{name} {ranked[0][1]} {ranked[0][0]:.3g}")
    without = run.median(case, NO_L3, "ttft_p50_s") or 0.0
    return f"{case}: " + ", ".join(parts) + f"; without L3 p50 {without:.3g} s"


def ttft_of(run: Run, case: str, policy: str) -> list[float]:
    """TTFT of each request of one arm, the median over its rounds."""
    rounds = [s.series["ttft_s"] for s in run.samples if (s.case, s.arm) == (case, policy) and not s.error]
    return [float(np.median(times)) for times in zip(*rounds, strict=True)]


def plots(run: Run, matrix: Matrix) -> list[Plot]:
    """Median, tail and recomputed GPU time by store and policy, one plot per load and metric."""
    return [
        _plot(run, matrix, load.name, metric, what)
        for load in matrix.loads
        for metric, what in (
            ("ttft_p50_s", "TTFT p50, s"),
            ("ttft_p99_s", "TTFT p99, s"),
            ("gpu_s_recomputed", "GPU s spent on tokens that L3 held"),
        )
    ]


def _plot(run: Run, matrix: Matrix, load: str, metric: str, what: str) -> Plot:
    series = {
        policy: [
            (float(i), value, value, value)
            for i, store in enumerate(matrix.stores)
            if (value := run.median(case_name(load, store), policy, metric)) is not None
        ]
        for policy in matrix.policies
    }
    without = run.median(case_name(load, matrix.stores[0]), NO_L3, metric) or 0.0
    highest = max((p[1] for points in series.values() for p in points), default=0.0)
    level = (without, "without L3") if 0 < without <= 3 * highest else None
    beyond = f" (without L3: {without:.3g})" if without and level is None else ""
    return Plot(f"{load}: {what}{beyond}", "store", what, series, ticks=tuple(matrix.stores), level=level)
