"""`hicache-ext verify`: read pages back and check what they hold. A page that fails is dropped: it is only a cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from sglang_hicache_ext.cli.offline import Pace, handle_of, open_existing, pick_namespaces
from sglang_hicache_ext.cli.render import FINDINGS, OK, SEVERE, Output
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.storage_backends.nvme.survey import NamespaceSurvey

WAVE = 64


def run(paths: list[str], namespace: str, sample: float, seed: int, rate: int, out: Output) -> int:
    """Check the share ``sample`` (0..1] of the pages, at ``rate`` bytes a second at most; 0: without a limit.

    Returns OK when every page proved itself, FINDINGS when pages were dropped, SEVERE when pages could not be read.
    """
    tally: Counter[str] = Counter()
    pace = Pace(rate)
    with open_existing(paths) as store:
        found = pick_namespaces(store, namespace)
        with out.progress("verifying", sum(n.pages for n in found)) as advance:
            for one in found:
                _verify(store, one, random.Random(seed), sample, pace, tally, advance)
    checked = sum(tally.values())
    out.document({"checked_pages": checked, "outcomes": dict(tally)})
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.items())) or "nothing to check"
    out.line(f"checked {checked} pages: {told}")
    if tally[Outcome.CORRUPT]:
        out.line(
            f"{tally[Outcome.CORRUPT]} corrupt pages were dropped; they will be written again when they are needed"
        )
    if tally[Outcome.READ_ERROR] or tally[Outcome.LATE]:
        return SEVERE
    return FINDINGS if tally[Outcome.CORRUPT] else OK


def _verify(
    store: NvmeStore,
    one: NamespaceSurvey,
    dice: random.Random,
    sample: float,
    pace: Pace,
    tally: Counter[str],
    advance: Callable[[int], None],
) -> None:
    ns, number = handle_of(store, one), store.number_of(one.id)
    if number is None:
        return
    waiting: dict[int, list[bytes]] = {}
    for page in store.survey().pages(number):
        advance(1)
        if sample < 1.0 and dice.random() >= sample:
            continue
        same = waiting.setdefault(page.nbytes, [])
        same.append(page.key)
        if len(same) == WAVE:
            tally.update(store.verify(ns, waiting.pop(page.nbytes), page.nbytes))
            pace.spend(WAVE * page.nbytes)
    for nbytes, keys in waiting.items():
        tally.update(store.verify(ns, keys, nbytes))
