"""One benchmark run: it measures, judges against goals, and writes what a reader needs to believe it."""

from __future__ import annotations

import datetime
import json
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from measure.arms import Arm, interleave
from measure.facts import device_line, environment
from measure.meters import Progress
from measure.plots import Plot, write_pngs
from measure.report import write_report
from measure.samples import (
    Sample,
    Spread,
    WarmRead,
    WrongBytes,
    metric_values,
    paired_ratios,
    spread_of,
    table_rows,
)
from measure.tables import text_table

SCHEMA = 1
EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_WARM = 0, 1, 2, 3
_COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Goal:
    """What a summary figure has to reach: ``Goal(">=", 0.95, "cold read, share of the ceiling")``."""

    op: str
    value: float
    meaning: str

    def holds(self, figure: float | None) -> bool | None:
        return None if figure is None else _COMPARE[self.op](figure, self.value)


@dataclass(slots=True)
class Run:
    """Collects samples, summary, plots and notes of one benchmark and writes JSON, HTML and PNG.

    Args:
        name: the benchmark's name.
        path: directory whose file system is measured; None when no disk is involved.
        requested: configuration asked for, JSON-ready.
        seed, is_smoke: as given on the command line.
        columns: metrics shown in the printed table, in order; all when empty.
    """

    name: str
    path: str | os.PathLike[str] | None = None
    requested: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    is_smoke: bool = False
    columns: Sequence[str] = ()
    out: TextIO = field(default_factory=lambda: sys.stdout)
    arm_requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    effective: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    summary: dict[str, float | None] = field(default_factory=dict)
    goals: dict[str, Goal] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    is_warm: bool = False
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        self.facts = environment(self.path)

    def measure(self, case: str, arms: Sequence[Arm], rounds: int, warm_up: int = 1) -> bool:
        """Run the arms interleaved. False when the run must stop: wrong bytes, or warm where cold was promised."""
        progress = Progress(len(arms) * (rounds + warm_up))
        try:
            for sample in interleave(case, arms, rounds, self.seed, warm_up, progress.step):
                self.samples.append(sample)
                self._note_failure(sample, arms)
        except (WrongBytes, WarmRead) as exc:
            self.fail(exc)
            return False
        except KeyboardInterrupt:
            self.failures.append(f"interrupted in {case}; what was measured until then is kept")
            return False
        finally:
            progress.end()
            for arm in arms:
                self._record(case, arm)
        return True

    def _note_failure(self, sample: Sample, arms: Sequence[Arm]) -> None:
        required = {a.name for a in arms if a.is_required}
        if sample.error and sample.arm in required:
            self.failures.append(f"{sample.case}, {sample.arm}, round {sample.round}: {sample.error}")

    def _record(self, case: str, arm: Arm) -> None:
        self.arm_requests.setdefault(arm.name, arm.requested)
        self.effective.setdefault(case, {})[arm.name] = arm.effective()

    def fail(self, exc: Exception) -> None:
        """The whole run is void: wrong bytes, or a warm read."""
        self.is_warm = self.is_warm or isinstance(exc, WarmRead)
        self.failures.append(f"{type(exc).__name__}: {exc}")

    def values(self, case: str, arm: str, metric: str) -> list[float]:
        return metric_values(self.samples, case, arm, metric)

    def spread(self, case: str, arm: str, metric: str) -> Spread | None:
        return spread_of(self.values(case, arm, metric))

    def median(self, case: str, arm: str, metric: str) -> float | None:
        found = self.spread(case, arm, metric)
        return found.p50 if found else None

    def ratio(self, case: str, arm: str, base: str, metric: str) -> Spread | None:
        """``arm`` / ``base``, taken within each round."""
        return spread_of(paired_ratios(self.samples, case, arm, base, metric))

    def conclude(self, name: str, figure: float | Spread | None, goal: Goal | None = None) -> None:
        """Put a figure into ``summary``, its spread into ``extra``, and remember what it had to reach."""
        if isinstance(figure, Spread):
            self.extra.setdefault("summary_spread", {})[name] = figure.words()
            figure = figure.p50
        self.summary[name] = figure
        if goal is not None:
            self.goals[name] = goal

    def words(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "schema": SCHEMA,
            "benchmark": self.name,
            "date": self.date,
            "device": device_line(self.facts),
            "seed": self.seed,
            "is_smoke": self.is_smoke,
            **self.facts,
            "config_requested": {"options": self.requested, "arms": self.arm_requests},
            "config_effective": self.effective,
            "summary": self.summary,
            "goals": self._goal_words(),
            "notes": self.notes,
            "failures": self.failures,
            "is_warm": self.is_warm,
            "exit_code": self.exit_code,
            "table": table_rows(self.samples),
            "extra": self.extra,
            "samples": [s.words() for s in self.samples],
        }

    def _goal_words(self) -> dict[str, Any]:
        return {
            name: {
                "op": goal.op,
                "value": goal.value,
                "meaning": goal.meaning,
                "is_reached": self._is_reached(name),
            }
            for name, goal in self.goals.items()
        }

    def _is_reached(self, name: str) -> bool | None:
        """A smoke run is too short to be judged."""
        goal = self.goals.get(name)
        return None if goal is None or self.is_smoke else goal.holds(self.summary.get(name))

    @property
    def exit_code(self) -> int:
        if self.is_warm:
            return EXIT_WARM
        return EXIT_FAILED if self.failures else EXIT_OK

    def finish(self, json_file: str = "", report_file: str = "", plots_dir: str = "") -> int:
        """Print the tables, write the files asked for, return the exit code."""
        document = self.words()
        self.out.write(self.text(document))
        if json_file:
            _write(json_file, json.dumps(document, indent=1, default=_plain))
        if plots_dir:
            write_pngs(self.plots, self.name, plots_dir)
        if report_file:
            _write(report_file, write_report(document, self.plots, self.columns))
        for problem in self.failures:
            print(f"{self.name}: {problem}", file=sys.stderr)
        return self.exit_code

    def text(self, document: Mapping[str, Any]) -> str:
        """What is printed: device, one table of medians, notes, the summary against its goals."""
        parts = [f"{self.name}  {document['date']}  {document['device']}", ""]
        parts.append(text_table(document["table"], self.columns))
        parts += [f"note: {n}" for n in self.notes]
        parts.append("")
        for name, figure in self.summary.items():
            goal = self.goals.get(name)
            state = {True: "reached", False: "MISSED", None: "not judged" if figure is not None else "not measured"}
            tail = f"  goal {goal.op} {goal.value:g}: {state[self._is_reached(name)]}  ({goal.meaning})" if goal else ""
            parts.append(f"{name:32} {'-' if figure is None else f'{figure:10.4g}'}{tail}")
        return "\n".join(parts) + "\n"


def _plain(value: Any) -> Any:
    """JSON for NumPy scalars and paths; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
