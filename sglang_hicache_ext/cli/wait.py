"""`hicache-ext wait`: block until a prompt's pages are durable, whichever server writes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang_hicache_ext.cli.offline import matches, open_existing
from sglang_hicache_ext.cli.render import FINDINGS, OK, Output
from sglang_hicache_ext.durability import LONGEST_PAUSE_S, DurablePrefix
from sglang_hicache_ext.keys import hash_chain, key_bytes
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore


def run(paths: list[str], tokens: Sequence[int], namespace: str, ranks: int, timeout_s: float, out: Output) -> int:
    """OK once ``ranks`` namespaces hold every whole page of ``tokens``; FINDINGS after ``timeout_s`` seconds."""
    started = time.monotonic()
    with open_existing(paths) as store:
        while True:
            pages = {ns.id.hex(): _durable(store, ns, tokens) for ns in _wanted(store, namespace)}
            done = [i for i, (durable, whole) in pages.items() if durable == whole]
            if len(done) >= ranks or time.monotonic() - started >= timeout_s:
                break
            time.sleep(LONGEST_PAUSE_S)
    waited = round(time.monotonic() - started, 3)
    rows: list[dict[str, Any]] = [
        {"namespace": i, "durable_pages": durable, "pages": whole} for i, (durable, whole) in pages.items()
    ]
    is_durable = len(done) >= ranks
    out.document({"durable": is_durable, "waited_s": waited, "namespaces": rows})
    out.table(
        ("namespace", "durable pages", "of"), [(r["namespace"][:8], r["durable_pages"], r["pages"]) for r in rows]
    )
    out.line(f"{'durable' if is_durable else 'not durable'} after {waited:.2f} s")
    return OK if is_durable else FINDINGS


def _wanted(store: NvmeStore, namespace: str) -> list[Namespace]:
    """Namespaces of KV pages that match; a server may register its own while we wait."""
    found = [ns for ns in store.namespaces() if ns.fingerprint.pool == "kv" and ns.fingerprint.page_tokens]
    return [ns for ns in found if matches(ns.id, ns.fingerprint.words(), namespace)]


def _durable(store: NvmeStore, ns: Namespace, tokens: Sequence[int]) -> tuple[int, int]:
    """(durable, all) whole pages of ``tokens``."""
    keys = [key_bytes(k) for k in hash_chain(tokens, ns.fingerprint.page_tokens)]
    return DurablePrefix(store, ns, keys).durable_pages(), len(keys)
