"""One read split over two tiers, and what it leaves in flight."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import Drain, Namespace, PageStore, ReadResult
from sglang_hicache_ext.storage_backends.record import memory_at

_SECOND_CHANCE = frozenset({Outcome.CORRUPT, Outcome.EVICTED, Outcome.READ_ERROR, Outcome.ABSENT, Outcome.MISMATCH})


class BothDrains:
    """Done when every part is."""

    def __init__(self, parts: Sequence[Drain]) -> None:
        self._parts = parts

    def is_done(self) -> bool:
        return all(p.is_done() for p in self._parts)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(p.wait(max(0.0, deadline - time.monotonic())) for p in self._parts)


class SplitRead:
    """One read while its two halves run. Rows are disjoint between the halves, so they need no lock."""

    def __init__(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None, metrics: Metrics
    ) -> None:
        self._ns, self._keys, self._regions, self._metrics = ns, keys, regions, metrics
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._outcomes = [Outcome.READ_ERROR] * len(keys)
        self._draining: list[int] = []
        self._drains: list[Drain] = []
        self._late_s = 0.0
        self.loaded_from: dict[int, PageStore] = {}

    def run(self, tier: PageStore, rows: list[int]) -> None:
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            result = tier.read(self._ns, [self._keys[r] for r in rows], self._regions.take(rows), left)
        except StoreError:
            self._metrics.add("tier_failures")
            return
        for row, outcome in zip(rows, result.outcomes, strict=True):
            self._outcomes[row] = outcome
            if outcome is Outcome.LOADED:
                self.loaded_from[row] = tier
        if result.drain is not None:
            self._draining += [rows[i] for i in result.draining]
            self._drains.append(result.drain)
        self._late_s = max(self._late_s, result.late_s)

    def second_chance(self, far: PageStore, near_rows: list[int]) -> None:
        """Try the far tier for pages that the near one promised and did not deliver."""
        draining = set(self._draining)
        rows = [r for r in near_rows if self._outcomes[r] in _SECOND_CHANCE and r not in draining]
        if rows and (self._deadline is None or time.monotonic() < self._deadline):
            before = {r: self._outcomes[r] for r in rows}
            self.run(far, rows)
            for row in rows:
                if self._outcomes[row] is not Outcome.LOADED:
                    self._outcomes[row] = before[row]

    def explain(self, near: PageStore, far_rows: list[int]) -> None:
        """Let the near tier say more about pages that neither has."""
        rows = [r for r in far_rows if self._outcomes[r] is Outcome.ABSENT]
        if not rows:
            return
        try:
            told = near.why_absent(self._ns, [self._keys[r] for r in rows])
        except StoreError:
            self._metrics.add("tier_failures")
            return
        for row, outcome in zip(rows, told, strict=True):
            self._outcomes[row] = outcome if outcome is not Outcome.LOADED else Outcome.ABSENT

    def result(self) -> ReadResult:
        drain = BothDrains(self._drains) if self._drains else None
        return ReadResult(tuple(self._outcomes), tuple(sorted(self._draining)), drain, self._late_s)


def gather(regions: Regions, row: int, target: memoryview) -> None:
    """Copy the bytes of page ``row`` into ``target``, region after region."""
    start = 0
    for addr, size in zip(regions.addrs[row].tolist(), regions.sizes.tolist(), strict=True):
        target[start : start + size] = memory_at(addr, size)
        start += size
