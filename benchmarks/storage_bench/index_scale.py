"""The index at scale: existence queries, opening after a clean close and after kill -9, rebuilding, bytes per page.

The store is filled with real 16 KiB records. Each opening runs in a fresh process with the page cache dropped, so
that it costs what a restarted server pays.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Arena, Progress, Run, drop_page_cache, files_below, page_keys, spread_of

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from storage_bench.shape import GIB, KIB
from storage_bench.verdict import GOALS

PAGE_BYTES = 16 * KIB
FILL_BATCH = 2048
QUERIES = 2000
SALT = "index scale"


def _config(path: str, pages: int) -> HiCacheExtConfig:
    capacity = int(pages * PAGE_BYTES * 1.08) + GIB
    return HiCacheExtConfig.parse({"path": path, "capacity": capacity})


def _open(path: str, pages: int) -> Any:
    from sglang_hicache_ext.storage_backends import open_store

    return open_store(_config(path, pages))


def _namespace(store: Any) -> Any:
    return store.namespace(Fingerprint(model="bench_storage index", page_tokens=1, layout="page_first"))


def fill(path: str, pages: int) -> int:
    """Write ``pages`` records and close cleanly; returns the pages the store then says it has."""
    store, arena = _open(path, pages), Arena(FILL_BATCH, PAGE_BYTES)
    ns, keys = _namespace(store), page_keys(pages, SALT)
    progress = Progress(-(-pages // FILL_BATCH))
    for start in range(0, pages, FILL_BATCH):
        progress.step(f"index: writing {pages:,} pages of 16 KiB")
        own = keys[start : start + FILL_BATCH]
        arena.stamp(own)
        outcomes = store.write(ns, own, arena.regions(0, len(own)), 60.0).outcomes
        if not all(o.is_stored for o in outcomes):
            raise RuntimeError(f"page not stored at {start}: {sorted({str(o) for o in outcomes})}")
    progress.end()
    held = int(store.stats().pages)
    store.close()
    return held


def _private_bytes() -> int:
    """Anonymous memory of this process, resident now."""
    fields = Path("/proc/self/smaps_rollup").read_text().split("\n")
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("Anonymous:"))


def probe(path: str, pages: int, what: str) -> dict[str, Any]:
    """One opening in this process: seconds until ready, and what the store then answers."""
    import sglang_hicache_ext.storage_backends.nvme.store  # noqa: F401  (importing is not opening)

    before, begin = _private_bytes(), time.perf_counter()
    store = _open(path, pages)
    found: dict[str, Any] = {"open_s": time.perf_counter() - begin, "pages": int(store.stats().pages)}
    ns = _namespace(store)
    keys = page_keys(pages, SALT)
    rng = np.random.default_rng(1)
    chosen = [keys[int(i)] for i in rng.integers(0, pages, 128)]
    found["present_of_128"] = int(store.contains(ns, chosen).sum())
    if what == "queries":
        found |= _queries(store, ns, keys, rng)
        del keys, chosen
        found["private_bytes"] = max(0, _private_bytes() - before)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()
    return found


def _queries(store: Any, ns: Any, keys: list[bytes], rng: np.random.Generator) -> dict[str, Any]:
    hits, misses = [], page_keys(128, "never written")
    us: dict[str, list[float]] = {"hit_us": [], "miss_us": []}
    for _ in range(QUERIES):
        hits.append([keys[int(i)] for i in rng.integers(0, len(keys), 128)])
    for batch in hits:
        begin = time.perf_counter()
        present = store.contains(ns, batch)
        us["hit_us"].append((time.perf_counter() - begin) * 1e6)
        if not present.all():
            raise RuntimeError("a page that was written is not found")
    for _ in range(QUERIES // 10):
        begin = time.perf_counter()
        present = store.contains(ns, misses)
        us["miss_us"].append((time.perf_counter() - begin) * 1e6)
        if present.any():
            raise RuntimeError("a page that was never written is found")
    return us


def _child(path: str, pages: int, what: str) -> dict[str, Any]:
    drop_page_cache(files_below(path))
    command = [sys.executable, os.path.abspath(__file__), path, str(pages), what]
    folder = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    if what == "kill":
        if done.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the process that was to be killed ended with {done.returncode}: {done.stderr[-500:]}")
        return {}
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def index_bytes(path: str) -> int:
    """Bytes of the index files and the heat file that are really allocated."""
    files = [p for p in files_below(path) if p.suffix != ".seg"]
    return sum(p.stat().st_blocks * 512 for p in files)


def run_index(run: Run, path: str, pages: int) -> bool:
    """The whole part. Returns False when the store lost pages: then its figures mean nothing."""
    os.makedirs(path, mode=0o700)
    held = fill(path, pages)
    bytes_on_disk = index_bytes(path)
    queries = _child(path, pages, "queries")
    clean = _child(path, pages, "clean")
    _child(path, pages, "kill")
    killed = _child(path, pages, "killed")
    shutil.rmtree(os.path.join(path, "index"))
    rebuilt = _child(path, pages, "rebuild")
    probes = {"queries": queries, "clean": clean, "killed": killed, "rebuild": rebuilt}
    lost = [
        f"{name}: {p['pages']} pages, {p['present_of_128']} of 128 found"
        for name, p in probes.items()
        if p["pages"] < pages or p["present_of_128"] != 128
    ]
    for text in lost:
        run.failures.append(f"index of {pages} pages: {text}")
    per_page = (bytes_on_disk + queries["private_bytes"]) / pages
    hit_us, miss_us = spread_of(queries.pop("hit_us")), spread_of(queries.pop("miss_us"))
    assert hit_us is not None and miss_us is not None
    run.conclude("exists128_us", hit_us, GOALS["exists128_us"])
    run.conclude("open_clean_s", max(clean["open_s"], killed["open_s"]), GOALS["open_clean_s"])
    run.conclude("open_rebuild_s", rebuilt["open_s"], GOALS["open_rebuild_s"])
    run.conclude("index_bytes_per_page", per_page, GOALS["index_bytes_per_page"])
    run.extra["index"] = {
        "pages": pages, "pages_held": held, "page_bytes": PAGE_BYTES, "index_bytes_on_disk": bytes_on_disk,
        "miss_us": miss_us.words(), "probes": probes,
    }  # fmt: skip
    if pages < 1_000_000:
        run.notes.append(f"The index figures are for {pages:,} pages; the goals are for 1,000,000.")
    shutil.rmtree(path, ignore_errors=True)
    return not lost


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
