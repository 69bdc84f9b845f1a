"""Outcomes as small integers, so that a batch of thousands of pages is array work; and drains of several parts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.ports import Drain

READS = tuple(Outcome)
READ_CODE = {outcome: code for code, outcome in enumerate(READS)}
WRITES = tuple(WriteOutcome)
WRITE_CODE = {outcome: code for code, outcome in enumerate(WRITES)}
UNDECIDED = -1


def read_outcomes(codes: NDArray[np.int8]) -> tuple[Outcome, ...]:
    return tuple(map(READS.__getitem__, codes.tolist()))


def write_outcomes(codes: NDArray[np.int8]) -> tuple[WriteOutcome, ...]:
    return tuple(map(WRITES.__getitem__, codes.tolist()))


def count_reads(codes: NDArray[np.int8]) -> Counter[Outcome]:
    """Pages per outcome; counting enum members one by one would cost more than reading the pages."""
    return Counter({READS[code]: n for code, n in enumerate(np.bincount(codes, minlength=1).tolist()) if n})


def count_writes(codes: NDArray[np.int8]) -> Counter[WriteOutcome]:
    """Pages per outcome."""
    return Counter({WRITES[code]: n for code, n in enumerate(np.bincount(codes, minlength=1).tolist()) if n})


class DrainGroup:
    """Done when all its parts are."""

    def __init__(self, parts: Sequence[Drain]) -> None:
        self._parts = tuple(parts)

    def is_done(self) -> bool:
        return all(p.is_done() for p in self._parts)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(p.wait(max(0.0, deadline - time.monotonic())) for p in self._parts)


def join_drains(parts: Sequence[Drain | None]) -> Drain | None:
    """One drain for all of ``parts`` that are not None; None when there is none."""
    real = [p for p in parts if p is not None]
    if not real:
        return None
    return real[0] if len(real) == 1 else DrainGroup(real)
