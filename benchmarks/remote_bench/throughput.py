"""Get through the safety layer against plain batch_get_into, the same objects, the same run."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from harness import Arena, Arm, Measurement, Meter, Run, Trial, WrongBytes, page_keys

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore
from sglang_hicache_ext.storage_backends.remote.wire import HEADER_BYTES, ObjectNames

FINGERPRINT = Fingerprint(model="bench_remote")
CASE = "get {pages} x {kib} KiB"


def cpu_s_of(pid: int) -> float:
    """User and system seconds of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def worker_pid(store: RemoteStore) -> int:
    """The worker's process, or 0 when it runs as threads."""
    return int(getattr(store.client_worker, "pid", 0))


class OrdinaryArena(Arena):
    """An Arena in 4 KiB pages, as SGLang's host pool is: its allocator does not ask for huge ones."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        super().__init__(pages, page_bytes)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._map.madvise(mmap.MADV_DONTNEED)  # what the base class has touched comes back in small pages
        self.array[:: mmap.PAGESIZE] = 0


class PlainClient:
    """Mooncake's own client with registered memory, as an application without a safety layer has it."""

    def __init__(self, master: str, pages: int, object_bytes: int, arena: type[Arena]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        if self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master):
            raise RuntimeError(f"the plain client cannot reach {master}")
        self.arena = arena(pages, -(-object_bytes // 8192) * 8192)
        self.object_bytes = object_bytes
        if self.store.register_buffer(self.arena.addr, self.arena.array.nbytes):
            raise RuntimeError("the plain client cannot register memory")

    def get(self, names: list[str]) -> None:
        addrs = [self.arena.addr + i * self.arena.page_bytes for i in range(len(names))]
        codes = self.store.batch_get_into(names, addrs, [self.object_bytes] * len(names))
        if set(codes) != {self.object_bytes}:
            raise RuntimeError(f"plain get failed: {set(codes)}")


def run_throughput(run: Run, cluster: LocalCluster, pages: int, page_bytes: int, rounds: int, repeats: int) -> str:
    """Measure; returns the case's name."""
    config = HiCacheExtConfig.parse({"master": cluster.master_address})
    keys = page_keys(pages, f"throughput {page_bytes}")
    arena = OrdinaryArena(pages, page_bytes)
    arena.stamp(keys)
    stores = {"ours": RemoteStore(config), "ours, in process": RemoteStore(config, in_process=True)}
    ns = stores["ours"].namespace(FINGERPRINT)
    if not all(o.is_stored for o in stores["ours"].write(ns, keys, arena.regions()).outcomes):
        raise RuntimeError("the pool refused the pages of the benchmark")
    names = ObjectNames(config.tenant, b"").names(ns.id, keys)
    plains = {
        name: PlainClient(cluster.master_address, pages, page_bytes + HEADER_BYTES, kind)
        for name, kind in (("plain", OrdinaryArena), ("plain, huge pages", Arena))
    }
    node = cluster.of_kind("client")[0].process.pid
    nbytes = pages * page_bytes * repeats

    def measured(work: Any, pid: int) -> Measurement:
        before = cpu_s_of(pid) if pid else 0.0, cpu_s_of(node)
        with Meter() as meter:
            for _ in range(repeats):
                work()
        client = meter.cpu_s + (cpu_s_of(pid) - before[0] if pid else 0.0)
        return Measurement(
            {
                "gb_s": nbytes / meter.wall_s / 1e9,
                "batch_ms": meter.wall_s / repeats * 1e3,
                "cpu_s_per_gb": client / nbytes * 1e9,
                "node_cpu_s_per_gb": (cpu_s_of(node) - before[1]) / nbytes * 1e9,
            }
        )

    def ours(store: RemoteStore) -> Any:
        def get() -> None:
            outcomes = store.read(ns, keys, arena.regions()).outcomes
            if set(outcomes) != {Outcome.LOADED}:
                raise RuntimeError(f"read: {set(outcomes)}")

        def sample(_trial: Trial) -> Measurement:
            arena.blank()
            result = measured(get, worker_pid(store))
            arena.require(keys)
            return result

        return sample

    def plainly(plain: PlainClient) -> Any:
        def sample(_trial: Trial) -> Measurement:
            plain.arena.blank()
            result = measured(lambda: plain.get(names), 0)
            if bytes(plain.arena.array[:8]) != b"HXremote":
                raise WrongBytes("the plain client did not get the object")
            return result

        return sample

    arms = [Arm(n, plainly(p), {"call": "batch_get_into"}, is_required=True) for n, p in plains.items()]
    for name, store in stores.items():
        arms.append(Arm(name, ours(store), {"master": "loopback"}, store.describe, name == "ours", store.close))
    case = CASE.format(pages=pages, kib=page_bytes >> 10)
    run.measure(case, arms, rounds)
    for store in stores.values():
        store.close()
    for plain in plains.values():
        plain.store.close()
    return case
