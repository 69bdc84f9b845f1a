"""`hicache-ext inspect`: what is in a store, by model, with the fingerprint in words."""

from __future__ import annotations

from typing import Any

from sglang_hicache_ext.cli.offline import open_existing, pick_namespaces
from sglang_hicache_ext.cli.render import OK, Output, age_text, size_text
from sglang_hicache_ext.storage_backends.nvme.survey import NamespaceSurvey


def run(paths: list[str], namespace: str, out: Output) -> int:
    """Print the namespaces of the store in ``paths``; returns the exit code."""
    with open_existing(paths) as store:
        found = pick_namespaces(store, namespace)
        stats, described = store.stats(), store.describe()
    document = {
        "path": described["path"],
        "pages": stats.pages,
        "used_bytes": stats.used_bytes,
        "capacity_bytes": stats.capacity_bytes,
        "segment_bytes": described["segment_bytes"],
        "namespaces": [as_json(n) for n in found],
    }
    out.document(document)
    out.line(
        f"{', '.join(described['path'])}: {stats.pages} pages, {size_text(stats.used_bytes)} on disk"
        f" of {size_text(stats.capacity_bytes)}"
    )
    columns = ("namespace", "pages", "payload", "age oldest / newest", "read since written", "what it is")
    out.table(columns, [_row(n) for n in found])
    return OK


def as_json(found: NamespaceSurvey) -> dict[str, Any]:
    return {
        "namespace": found.id.hex(),
        "fingerprint": found.words,
        "pages": found.pages,
        "payload_bytes": found.nbytes,
        "oldest_s": round(found.oldest_s, 1),
        "newest_s": round(found.newest_s, 1),
        "read_pages": found.read_pages,
    }


def words_text(words: dict[str, Any] | None) -> str:
    """A fingerprint in one line, without what is empty or the default."""
    if words is None:
        return "not known in words"
    shown = {k: v for k, v in words.items() if v not in ("", "-", 0, {}, None)}
    if "model" in shown:
        shown["model"] = str(shown["model"])[:24]
    return " ".join(f"{k}={v}" for k, v in shown.items())


def _row(found: NamespaceSurvey) -> tuple[Any, ...]:
    heat = f"{found.read_pages} ({100 * found.read_pages / found.pages:.0f} %)" if found.pages else "0"
    ages = f"{age_text(found.oldest_s)} / {age_text(found.newest_s)}" if found.pages else "-"
    return found.id.hex()[:8], found.pages, size_text(found.nbytes), ages, heat, words_text(found.words)
