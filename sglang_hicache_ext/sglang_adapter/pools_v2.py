"""Which prefix lengths can be restored when a model has more pools than KV: a pure fold over presence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SidecarPresence:
    """One side pool in a hit query.

    Attributes:
        name: SGLang's pool name, the object it came as (it is a dict key of SGLang's).
        trailing: 0 when every page of the prefix is needed, else how many pages at its end.
        present: [pages] which pages of the chain the pool has.
    """

    name: str
    trailing: int
    present: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fold:
    """``restorable`` lists every legal prefix length in pages, ascending; ``boundaries`` each pool's own verdict."""

    restorable: list[int]
    boundaries: dict[str, int]

    @property
    def hit_pages(self) -> int:
        return self.restorable[-1] if self.restorable else 0


def leading(present: NDArray[np.bool_]) -> int:
    """Count the leading True."""
    return int(len(present) if present.all() else np.argmin(present))


def fold(kv_present: NDArray[np.bool_], sidecars: Sequence[SidecarPresence], kv_name: str = "kv") -> Fold:
    """Intersect the prefix lengths that each pool can restore.

    Source: sglang 0.5.23 srt/mem_cache/hicache_storage.py:981-1033 (the meaning of hit policies).
    """
    kv_pages = leading(kv_present)
    boundaries = {kv_name: kv_pages} if kv_pages else {}
    legal = np.ones(kv_pages, np.bool_)  # legal[i]: a prefix of i + 1 pages can be restored
    for sidecar in sidecars:
        if not legal.any():
            break
        own = _legal(sidecar.present[:kv_pages], sidecar.trailing)
        if own.any():
            boundaries[sidecar.name] = int(np.flatnonzero(own)[-1]) + 1
        legal &= own
    return Fold((np.flatnonzero(legal) + 1).tolist(), boundaries)


def _legal(present: NDArray[np.bool_], trailing: int) -> NDArray[np.bool_]:
    run = run_lengths(present)
    positions = np.arange(1, len(present) + 1)
    return run >= (np.minimum(positions, trailing) if trailing else positions)


def run_lengths(present: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[pages]: how many consecutive True end at each position."""
    positions = np.arange(1, len(present) + 1)
    last_gap = np.maximum.accumulate(np.where(present, 0, positions)) if len(present) else positions
    return positions - last_gap
