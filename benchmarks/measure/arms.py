"""Arms run interleaved: every round runs each arm once, in an order shuffled by the seed.

A drift of the device, of the host or of a neighbour then meets all arms alike, and a ratio taken within a
round cancels it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from measure.samples import Measurement, Sample, WarmRead, WrongBytes


@dataclass(frozen=True, slots=True)
class Trial:
    """One execution of an arm.

    Attributes:
        case: name of the case.
        round: 0-based; negative in warm-up rounds, whose results are dropped.
        seed: equal for all arms of a round, so that they do the same work.
        rng: generator seeded by ``seed``; fresh for every arm.
    """

    case: str
    round: int
    seed: int
    rng: np.random.Generator = field(repr=False)


@dataclass(slots=True)
class Arm:
    """One contestant.

    Attributes:
        name: as shown in tables.
        run: does the work once and returns what it measured; an exception is a failed sample.
        requested: configuration asked for.
        effective: configuration in use, read after the runs (an engine may have fallen back).
        is_required: a failing required arm fails the whole benchmark; a peer's failure is only shown.
        close: called once at the end.
    """

    name: str
    run: Callable[[Trial], Measurement]
    requested: dict[str, Any] = field(default_factory=dict)
    effective: Callable[[], dict[str, Any]] = dict
    is_required: bool = False
    close: Callable[[], None] | None = None


def interleave(
    case: str,
    arms: Sequence[Arm],
    rounds: int,
    seed: int,
    warm_up: int = 1,
    on_step: Callable[[str], None] = lambda _text: None,
) -> Iterator[Sample]:
    """Yield one sample per arm and round, warm-up rounds left out.

    Wrong bytes and warm reads are not failures of a sample but of the run: they are raised.
    """
    for round_index in range(-warm_up, rounds):
        round_seed = int(np.random.default_rng([seed, round_index + 1_000_000]).integers(1 << 31))
        order = np.random.default_rng(round_seed).permutation(len(arms))
        for position, index in enumerate(order):
            arm = arms[int(index)]
            label = f"{case}: {arm.name}, " + ("warm-up" if round_index < 0 else f"round {round_index + 1}/{rounds}")
            on_step(label)
            trial = Trial(case, round_index, round_seed, np.random.default_rng(round_seed))
            sample = _run_once(arm, trial, position)
            if round_index >= 0:
                yield sample


def _run_once(arm: Arm, trial: Trial, position: int) -> Sample:
    started, begin = time.time(), time.perf_counter()
    error = ""
    result = Measurement()
    try:
        result = arm.run(trial)
    except (WrongBytes, WarmRead) as exc:
        raise type(exc)(f"{trial.case}, {arm.name}: {exc}") from exc
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
    elapsed = time.perf_counter() - begin
    return Sample(
        trial.case,
        arm.name,
        trial.round,
        position,
        started,
        elapsed,
        result.values,
        result.series,
        result.facts,
        error,
    )
