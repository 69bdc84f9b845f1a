"""The experiment with servers of our own: fill once per arm, then restart in every round and read cold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness import Arm, Measurement, Progress, Run, Sample, Trial, WarmRead, WrongBytes, interleave

from cold_start_bench.client import Answer
from cold_start_bench.points import Point, as_measurement, measure_point, require_cold, require_same_tokens
from cold_start_bench.servers import RunningServer, ServerArm, engine_kit, require_device_reads

WARM_TOKENS = 520
"""Above the prefetch threshold, so that it is stored in the filling run and fetched in the others."""

SETTLE_S = 2.0
SETTLE_LIMIT_S = 60.0
Done = list[tuple[list[Answer], float]]


@dataclass(slots=True)
class LocalExperiment:
    """All arms over all points.

    Attributes:
        token_bytes: KV bytes per token, for the proof that they came from the device; 0 leaves it out.
        salt: of the prompts, the same in every round: each restart is cold.
        expected: what the first arm that computed a case answered.
    """

    run: Run
    arms: Sequence[ServerArm]
    points: Sequence[Point]
    rounds: int
    new_tokens: int
    token_bytes: int
    salt: int
    expected: dict[str, Done] = field(default_factory=dict)

    def execute(self) -> bool:
        """Fill, then measure interleaved. False when the run is void."""
        try:
            self._fill()
            for sample in interleave("restart", self._restart_arms(), self.rounds, self.salt, 0, self._say()):
                self._take_apart(sample)
        except (WrongBytes, WarmRead) as exc:
            self.run.fail(exc)
            return False
        except KeyboardInterrupt:
            self.run.failures.append("interrupted; what was measured until then is kept")
            return False
        return True

    def _say(self) -> Any:
        return Progress(len(self.arms) * self.rounds).step

    def _fill(self) -> None:
        """Every prompt once into each store; arms of one family share theirs.

        A store that cannot be filled fails the run; the other arms are still measured.
        """
        families = {a.family: a for a in reversed(self.arms) if a.has_storage}
        progress = Progress(len(families))
        for family, arm in families.items():
            progress.step(f"filling {family}")
            try:
                self._fill_one(arm)
            except engine_kit().EngineError as exc:
                self.run.failures.append(f"{family}, filling: {exc}")
                self.arms = [a for a in self.arms if a.family != family]

    def _fill_one(self, arm: ServerArm) -> None:
        with arm.serve() as server:
            warm_engine(server)
            for point in self.points:
                done = measure_point(server.client, point, self.salt, self.new_tokens)
                self.expected.setdefault(point.case, done)
            wait_until_written(server)

    def _restart_arms(self) -> list[Arm]:
        return [Arm(a.name, partial(self._round, a), {"arguments": a.arguments()}) for a in self.arms]

    def _round(self, arm: ServerArm, trial: Trial) -> Measurement:
        """One restart: every point once, cold."""
        how = arm.make_cold()
        points: dict[str, Measurement] = {}
        with arm.serve() as server:
            warm_engine(server)
            before = server.io_bytes()[0]
            tokens = 0
            for point in self.points:
                done = measure_point(server.client, point, self.salt, self.new_tokens)
                what = f"{arm.name}, {point.case}"
                require_cold(done, what)
                if point.callers == 1:
                    self._compare(point, done, what)
                points[point.case] = as_measurement(point, done)
                tokens += sum(points[point.case].facts["storage_tokens"])
            device = require_device_reads(server, before, tokens, self.token_bytes) if arm.has_storage else 0
            self.run.effective[arm.name] = server.describe()
        return Measurement(facts={"points": points, "cold_by": how, "bytes_from_device": device})

    def _compare(self, point: Point, done: Done, what: str) -> None:
        expected = self.expected.setdefault(point.case, done)
        for (want, _), (have, _) in zip(expected, done, strict=True):
            require_same_tokens(want, have, what)

    def _take_apart(self, sample: Sample) -> None:
        """One sample of a restart becomes one sample per point."""
        if sample.error:
            self._add(sample, "restart", Measurement(), sample.error)
            self.run.failures.append(f"{sample.arm}, round {sample.round}: {sample.error}")
            return
        for case, measured in sample.facts["points"].items():
            measured.facts |= {k: sample.facts[k] for k in ("cold_by", "bytes_from_device")}
            self._add(sample, case, measured, "")

    def _add(self, sample: Sample, case: str, measured: Measurement, error: str) -> None:
        self.run.samples.append(
            Sample(
                case, sample.arm, sample.round, sample.order, sample.started_s, sample.elapsed_s,
                measured.values, measured.series, measured.facts, error,
            )
        )  # fmt: skip


def warm_engine(server: RunningServer) -> None:
    """The first forward and the first fetch pay for set-up: let one prompt of its own pay, in all arms alike."""
    server.client.generate([3 + (7 * i) % 250 for i in range(WARM_TOKENS)], 2)


def wait_until_written(server: RunningServer) -> None:
    """Wait until the server has written nothing for SETTLE_S seconds and our queues are empty, SETTLE_LIMIT_S at most."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    last, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        now = server.io_bytes()[1]
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > SETTLE_S and not server.waiting_pages():
            return
        time.sleep(0.2)
