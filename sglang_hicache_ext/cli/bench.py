"""`hicache-ext bench`: how fast a store on this drive is, in half a minute and one verdict line."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.cli.render import OK, SEVERE, Output, size_text
from sglang_hicache_ext.config import GIB, MIB, HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions, regions_of_array
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

BATCH = 128


def run(
    path: str, page_bytes: int, total_bytes: int, token_bytes: int, prefill_tokens_per_s: float, out: Output
) -> int:
    """Write and read ``total_bytes`` in a scratch store under ``path``; the scratch store is removed.

    Args:
        token_bytes: KV bytes of one token on one rank, 0 when unknown; with it the verdict is in tokens.
        prefill_tokens_per_s: what recomputing does, 0 when unknown.
    """
    if not Path(path).is_dir():
        raise ConfigError("not a directory", path, "name a directory on the drive to measure")
    pages = max(BATCH, total_bytes // page_bytes // BATCH * BATCH)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=path) as scratch:
        capacity = max(GIB // 2, pages * page_bytes * 5 // 4 + 256 * MIB)
        store = NvmeStore(HiCacheExtConfig(path=(scratch,), capacity=capacity))
        try:
            result = _measure(store, pages, page_bytes, out)
        finally:
            store.close()
    result["verdict"] = verdict(result["read_gb_per_s"], token_bytes, prefill_tokens_per_s)
    out.document(result)
    out.line(f"{pages} pages of {size_text(page_bytes)} through {result['engine']} on {path}")
    for way in ("write", "read"):
        out.line(f"  {way:5} {result[f'{way}_gb_per_s']:.2f} GB/s, {result[f'{way}_cpu_s_per_gb']:.3f} CPU s/GB")
    out.line(result["verdict"])
    return OK if result["wrong_pages"] == 0 else SEVERE


def verdict(read_gb_per_s: float, token_bytes: int, prefill_tokens_per_s: float) -> str:
    """One line: is loading from this drive faster than recomputing?"""
    if not token_bytes:
        return f"reads {read_gb_per_s:.2f} GB/s; give --model to compare with recomputing"
    tokens = read_gb_per_s * 1e9 / token_bytes
    if not prefill_tokens_per_s:
        return f"loads {tokens:,.0f} tokens/s; worth it where prefill is slower than that"
    gain = tokens / prefill_tokens_per_s
    word = "worth it" if gain > 1 else "not worth it"
    return f"{word}: loads {tokens:,.0f} tokens/s, {gain:.1f}x of recomputing {prefill_tokens_per_s:,.0f} tokens/s"


def _measure(store: NvmeStore, pages: int, page_bytes: int, out: Output) -> dict[str, Any]:
    ns = store.namespace(Fingerprint(model="bench", extra={"page_bytes": str(page_bytes)}))
    rng = np.random.default_rng(7)
    keys = [rng.bytes(32) for _ in range(pages)]
    memory = rng.integers(0, 256, (BATCH, page_bytes), dtype=np.uint8)
    regions = regions_of_array(memory, (page_bytes // 2, page_bytes - page_bytes // 2))
    engine = store.describe()["engine"]

    def write(at: int) -> int:
        _stamp(memory, at)
        return sum(not o.is_stored for o in store.write(ns, keys[at : at + BATCH], regions).outcomes)

    def read(at: int) -> int:
        return _read_and_check(store, ns, keys[at : at + BATCH], memory, regions, at)

    starts = list(range(0, pages, BATCH))
    result: dict[str, Any] = {"engine": engine, "pages": pages, "page_bytes": page_bytes}
    refused = _timed("write", write, starts, pages * page_bytes, result, out)
    rng.shuffle(starts)
    wrong = _timed("read", read, starts, pages * page_bytes, result, out)
    return {**result, "refused_pages": refused, "wrong_pages": wrong}


def _timed(
    way: str, step: Callable[[int], int], starts: list[int], nbytes: int, result: dict[str, Any], out: Output
) -> int:
    before, started, bad = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), 0
    with out.progress(way, len(starts)) as advance:
        for at in starts:
            bad += step(at)
            advance(1)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result[f"{way}_gb_per_s"], result[f"{way}_cpu_s_per_gb"] = nbytes / seconds / 1e9, cpu / (nbytes / 1e9)
    return bad


def _stamp(memory: NDArray[np.uint8], at: int) -> None:
    memory[:, :8] = (np.arange(at, at + BATCH, dtype=np.uint64)[:, None]).view(np.uint8)


def _read_and_check(
    store: NvmeStore, ns: Namespace, keys: list[bytes], memory: NDArray[np.uint8], regions: Regions, at: int
) -> int:
    memory[:, :8] = 0xFF
    outcomes = store.read(ns, keys, regions).outcomes
    wanted = np.arange(at, at + BATCH, dtype=np.uint64)
    got = memory[:, :8].copy().view(np.uint64)[:, 0]
    return int((got != wanted).sum()) + sum(o is not Outcome.LOADED for o in outcomes)
