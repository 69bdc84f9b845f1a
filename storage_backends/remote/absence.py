"""Why a page is not in the remote store, as far as this process can know."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.mismatch import difference
from sglang_hicache_ext.storage_backends.remote.link import Link

OTHER_NAMESPACES = 64
"""Namespaces of this process, the youngest first, that are looked into before a page counts as absent."""
TIMEOUT_S = 0.5


def classify(
    link: Link, ns: Namespace, others: Sequence[Namespace], keys: Sequence[bytes]
) -> list[tuple[Outcome, str]]:
    """(outcome, one sentence) per key that the store does not have: EVICTED, MISMATCH or ABSENT.

    Args:
        others: every namespace registered here; nobody can look into those of another process or tenant.
    """
    names = link.names.names(ns.id, list(keys))
    out = [(Outcome.ABSENT, "never stored, or forgotten")] * len(keys)
    told = [(o, difference(ns.fingerprint, o.fingerprint)) for o in others if o.id != ns.id][-OTHER_NAMESPACES:]
    wanted = [(row, words, o) for o, words in told if words is not None for row in range(len(keys))]
    found = link.exist([link.names.name(o.id, keys[row]) for row, _, o in wanted], TIMEOUT_S) or ()
    for (row, words, _), is_there in zip(wanted, found, strict=False):
        if is_there:
            out[row] = (Outcome.MISMATCH, words)
    for row, name in enumerate(names):
        if name in link.history:
            out[row] = (Outcome.EVICTED, "seen in the remote store by this process, gone since")
    return out
