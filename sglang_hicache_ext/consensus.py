"""One vector per pump that tells the ranks each other's progress.

All collectives of the pipeline are this one: a minimum over a vector of fixed length, made by the owner thread in
``pump``. A failed, stopped or hung prefetch fills its slot like any other, so the number and the order of collective
calls cannot depend on what happened on one rank; and an out-of-order completion waits in its slot until every
page before it is there. A stamp over the order of the operations proves that the ranks speak of the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_HEADER = 4
_FIELDS = 5
UNKNOWN = -1

RUNNING, ARRIVED, DRAINED = 0, 1, 2
"""Phase of an operation's I/O: pages may still come; no more will come; no I/O can touch its host pages."""


class Report(NamedTuple):
    """One operation as one rank sees it, or after the minimum as all ranks agree.

    Attributes:
        hit: leading pages stored; UNKNOWN until the query is back.
        loaded: leading pages loaded.
        limit: pages that can still be reached.
        phase: RUNNING, ARRIVED or DRAINED.
        keep_waiting: 0 when the policy of a rank says stop.
    """

    hit: int = UNKNOWN
    loaded: int = 0
    limit: int = 0
    phase: int = RUNNING
    keep_waiting: int = 1


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks agree on.

    Attributes:
        is_sound: False when a rank met a bug of ours or the ranks speak of different operations.
        is_healthy: False when the store of a rank is stuck.
    """

    is_sound: bool
    is_healthy: bool
    reports: tuple[Report, ...]


def encode(slots: int, reports: list[Report], stamp: int, is_sound: bool, is_healthy: bool) -> NDArray[np.int64]:
    """Pack at most ``slots`` reports into a vector whose length depends on ``slots`` alone."""
    fields = [int(is_sound), int(is_healthy), stamp, -stamp]
    for report in reports:
        fields += report
    vector = np.zeros(_HEADER + _FIELDS * slots, np.int64)
    vector[: len(fields)] = fields
    return vector


def decode(vector: NDArray[np.int64], count: int) -> Agreement:
    """Unpack the minimum over the ranks; ``count`` reports, in the order they were packed."""
    is_sound, is_healthy, low, high = (int(v) for v in vector[:_HEADER])
    rows = vector[_HEADER : _HEADER + _FIELDS * count].reshape(count, _FIELDS).tolist()
    return Agreement(bool(is_sound) and low == -high, bool(is_healthy), tuple(map(Report._make, rows)))


def stamp_of(order: list[int]) -> int:
    """A number that differs when the operations or their order differ."""
    return hash(tuple(order)) >> 8
