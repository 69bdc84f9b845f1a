"""Why a page is not there: never stored, reclaimed, or stored under another fingerprint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.mismatch import difference
from sglang_hicache_ext.storage_backends.nvme.codes import READ_CODE, UNDECIDED
from sglang_hicache_ext.storage_backends.nvme.heat import Heat
from sglang_hicache_ext.storage_backends.nvme.index import Index

MAX_NAMESPACES = 64
"""Other namespaces looked at per key, the youngest first."""


class Explainer:
    """Thread-safe; only reads."""

    def __init__(self, index: Index, heat: Heat) -> None:
        self._index, self._heat = index, heat

    def decide(self, ns: Namespace, number: int, keys: Sequence[bytes], codes: NDArray[np.int8]) -> None:
        """Replace every UNDECIDED code by ABSENT, EVICTED or MISMATCH."""
        rows = np.flatnonzero(codes == UNDECIDED)
        if len(rows):
            missing = [keys[r] for r in rows.tolist()]
            codes[rows] = [READ_CODE[outcome] for outcome, _ in self._classify(ns, number, missing)]

    def explain(self, ns: Namespace, number: int, keys: Sequence[bytes]) -> list[tuple[Outcome, str]]:
        """(outcome, one sentence) per key."""
        out = [(Outcome.LOADED, "present")] * len(keys)
        rows = np.flatnonzero(~self._index.contains(number, keys)).tolist() if keys else []
        for row, answer in zip(rows, self._classify(ns, number, [keys[r] for r in rows]), strict=True):
            out[row] = answer
        return out

    def _classify(self, ns: Namespace, number: int, keys: list[bytes]) -> list[tuple[Outcome, str]]:
        out = [(Outcome.ABSENT, "never stored, or forgotten")] * len(keys)
        if not keys:
            return out
        for _, other, words in self._index.namespaces(MAX_NAMESPACES):
            if other == number:
                continue
            told = difference(ns.fingerprint, Fingerprint.from_words(words) if words is not None else None)
            if told is not None:
                for row in np.flatnonzero(self._index.contains(other, keys)).tolist():
                    out[row] = (Outcome.MISMATCH, told)
        for row in np.flatnonzero(self._heat.was_evicted(number, keys)).tolist():
            out[row] = (Outcome.EVICTED, "stored once, reclaimed since")
        return out
