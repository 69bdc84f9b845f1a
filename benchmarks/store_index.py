"""The NVMe store's index at size: existence queries, publishing, opening, rebuilding, bytes per page.

    python -m benchmarks.store_index --pages 1000000 --dir /tmp/index-bench

Pages of 16 KiB in batches of 128. Headers and tables are really written, payloads are left as holes: nothing measured
here touches them, and a million pages fit a small disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.engines import IoEngine, IoPlan, IoResult, open_engine
from sglang_hicache_ext.storage_backends.engines.base import OnOps
from sglang_hicache_ext.storage_backends.nvme import prealloc, segments
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.storage_backends.record import DIGEST_BYTES, PageDigests
from sglang_hicache_ext.testing.stamps import HostArena

PAGE_BYTES, BATCH = 16_384, 128


class TablesOnly:
    """Writes tables and leaves payloads out."""

    def __init__(self, inner: IoEngine) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, plan: IoPlan, deadline_s: float, on_submitted: OnOps | None = None) -> IoResult:
        if on_submitted is None:
            return self._inner.write(plan, deadline_s)
        on_submitted(np.arange(len(plan)))
        return IoResult(plan.op_bytes.copy())


def sparse(fd: int, nbytes: int) -> str:
    os.ftruncate(fd, nbytes)
    return "sparse"


def keys_of(batch: int) -> list[bytes]:
    raw = random.Random(batch).randbytes(32 * BATCH)
    return [raw[i : i + 32] for i in range(0, len(raw), 32)]


def config(path: Path, pages: int) -> HiCacheExtConfig:
    capacity = int(pages * PAGE_BYTES * 1.1) + (256 << 20)
    return HiCacheExtConfig(path=(str(path),), capacity=capacity, engine="posix")


def timed_us(call: Callable[[], Any], repeat: int) -> dict[str, float]:
    """Wall time, and CPU time of the thread, which other load on the machine disturbs less."""
    samples, cpu = [], []
    for _ in range(repeat):
        start, busy = time.perf_counter(), time.thread_time()
        call()
        cpu.append((time.thread_time() - busy) * 1e6)
        samples.append((time.perf_counter() - start) * 1e6)
    samples.sort()
    return {
        "p50": round(statistics.median(samples), 1),
        "p99": round(samples[int(0.99 * len(samples))], 1),
        "cpu_p50": round(statistics.median(cpu), 1),
    }


def fill(path: Path, pages: int) -> dict[str, float]:
    segments.preallocate = prealloc.preallocate = sparse
    real = PageDigests.digest
    PageDigests.digest = lambda self, page: bytes(DIGEST_BYTES)  # type: ignore[method-assign]  # no payloads
    path.mkdir(parents=True, mode=0o700)
    store = NvmeStore(config(path, pages), engine=TablesOnly(open_engine("posix", str(path))))
    ns = store.namespace(Fingerprint("index"))
    arena = HostArena(BATCH, (PAGE_BYTES,))
    samples = []
    for batch in range(pages // BATCH):
        start = time.perf_counter()
        store.write(ns, keys_of(batch), arena.regions)
        samples.append((time.perf_counter() - start) * 1e6)
    store.close()
    PageDigests.digest = real  # type: ignore[method-assign]
    tail = sorted(samples[-1000:])
    return {"write128_us_p50": tail[len(tail) // 2], "write128_us_p99": tail[int(0.99 * len(tail))]}


def query(store: NvmeStore, ns: Namespace, pages: int) -> dict[str, Any]:
    rng = random.Random(0)
    batches = pages // BATCH
    chains = [keys_of(rng.randrange(batches)) for _ in range(3000)]
    spread = [[rng.choice(chain) for chain in rng.sample(chains, BATCH)] for _ in range(3000)]
    absent = [keys_of(batches + i) for i in range(3000)]
    known = {k: None for chain in chains for k in chain}

    def over(sets: Sequence[list[bytes]], ask: Callable[[list[bytes]], Any]) -> dict[str, float]:
        turn = iter(sets)
        return timed_us(lambda: ask(next(turn)), len(sets))

    assert all(store.contains(ns, chain).all() for chain in chains[:10])
    return {
        "exists128_us": over(chains, lambda k: store.contains(ns, k)),
        "exists128_spread_us": over(spread, lambda k: store.contains(ns, k)),
        "exists128_absent_us": over(absent, lambda k: store.contains(ns, k)),
        "hit_pages128_us": over(chains, lambda k: store.hit_pages(ns, k, 1.0)),
        "dict128_us": over(spread, lambda k: [key in known for key in k]),
    }


def _open_and_die(path: Path, pages: int) -> None:
    store = NvmeStore(config(path, pages))
    ns = store.namespace(Fingerprint("index"))
    store.remove(ns, keys_of(0)[:1])
    os._exit(9)


def timed_open(path: Path, pages: int) -> tuple[dict[str, float], NvmeStore]:
    start, busy = time.perf_counter(), time.process_time()
    store = NvmeStore(config(path, pages))
    taken = time.perf_counter() - start, time.process_time() - busy
    return {"wall_s": round(taken[0], 3), "cpu_s": round(taken[1], 3)}, store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    path: Path = args.dir / "store"
    shutil.rmtree(path, ignore_errors=True)
    result: dict[str, Any] = {"pages": args.pages, **fill(path, args.pages)}
    result["open_clean"], store = timed_open(path, args.pages)
    ns = store.namespace(Fingerprint("index"))
    result |= query(store, ns, args.pages)
    mapped = store._index.bytes_on_disk + store.layout.heat_bytes
    result["index_bytes_per_page"] = mapped / store.stats().pages
    store.close()
    child = multiprocessing.get_context("spawn").Process(target=_open_and_die, args=(path, args.pages))
    child.start()
    child.join()
    result["open_after_kill"], store = timed_open(path, args.pages)
    pages = store.stats().pages
    store.close()
    shutil.rmtree(path / "index")
    result["open_rebuild"], store = timed_open(path, args.pages)
    assert store.stats().pages >= pages, "the rebuild lost pages"
    result["index_bytes_per_page_rebuilt"] = (store._index.bytes_on_disk + store.layout.heat_bytes) / pages
    result["exists128_us_rebuilt"] = query(store, ns, args.pages)["exists128_us"]
    store.close()
    shutil.rmtree(path)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
