"""When a missing page is there under another fingerprint: is that worth telling, and how."""

from __future__ import annotations

from sglang_hicache_ext.keys import Fingerprint

_SHARDS = ("tp", "pp", "cp", "dcp")
_SIBLING_FIELDS = frozenset((*_SHARDS, "layer_start", "layer_end", "pool"))


def difference(mine: Fingerprint, other: Fingerprint | None) -> str | None:
    """One sentence naming the fields that differ, or None when ``other`` is a sibling: another rank or pool of the same
    deployment stores other bytes under the same keys, and a page of its own is no sign of a mismatch."""
    if other is None:
        return "stored under another fingerprint, which is not known in words"
    fields = mine.differing_fields(other)
    if set(fields) <= _SIBLING_FIELDS and all(_size(getattr(mine, f)) == _size(getattr(other, f)) for f in _SHARDS):
        return None
    return f"stored under another fingerprint; differs in: {', '.join(fields)}"


def _size(shard: str) -> str:
    """The size of "rank/size"."""
    return shard.rpartition("/")[2]
