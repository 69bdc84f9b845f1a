"""The direct linker: device pools filled from NVMe layer by layer, with no host tier in between.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "NvmeLinker",
        "linker_module_path": "sglang_hicache_ext.sglang_adapter.linker", "linker_extra_config": {"path": ..., ...}}'

SGLang calls it from its scheduler thread and does not catch what it raises there, so nothing does: a lookup that fails
is a miss, a load that fails aborts its requests, an offload that fails is offered again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.utils import get_device_module

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError, HiCacheExtError
from sglang_hicache_ext.keys import key_bytes
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.sglang_adapter import hooks
from sglang_hicache_ext.sglang_adapter.epoch import CURRENT
from sglang_hicache_ext.sglang_adapter.guard import Guard
from sglang_hicache_ext.sglang_adapter.linker_choice import choose_path
from sglang_hicache_ext.sglang_adapter.linker_identity import linker_deployment, pool_fingerprint, rank_and_size
from sglang_hicache_ext.sglang_adapter.linker_loads import Batch, LoadQueue, Source
from sglang_hicache_ext.sglang_adapter.linker_offload import OffloadJob, OffloadPart, OffloadQueue
from sglang_hicache_ext.sglang_adapter.linker_pools import KV, WHERE, DevicePool, align_host_pool, device_pools
from sglang_hicache_ext.sglang_adapter.linker_source import PoolLoad
from sglang_hicache_ext.sglang_adapter.pools_v2 import SidecarPresence, fold
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredPages
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.storage_backends.nvme.writer import largest_batch

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
MAX_NAMESPACES = 64
LIVE: weakref.WeakSet[NvmeLinker] = weakref.WeakSet()
"""Linkers of this process that are open."""


def _name(transfer: Any) -> str:
    return str(getattr(transfer.name, "value", transfer.name))


class NvmeLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """SGLang's external linker over the NVMe store.

    Args:
        server_args, params: SGLang's.
        components: of SGLang's cache tree; FULL and SWA are supported.
        extra_config: our keys, as for the storage backend.
        forward_stream: the stream the forward writes KV on, None where there is one stream only.

    Raises:
        ConfigError, CapabilityError: bad input, or a model that the linker cannot serve, by name.
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None
    ) -> None:
        self.forward_stream = forward_stream
        try:
            self._open(server_args, params, {str(c.name).lower() for c in components}, dict(extra_config or {}))
        except HiCacheExtError as error:
            logger.critical("sglang-hicache-ext refuses to start: %s", error)
            raise

    def _open(self, server_args: Any, params: Any, components: set[str], extra: dict[str, Any]) -> None:
        self.config = HiCacheExtConfig.parse(extra, WHERE)
        self.metrics = Metrics()
        self._guard = Guard(self.metrics)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        align_host_pool(kvcache)
        self._device = device_pools(kvcache, params.page_size, components)
        replicated = self._device.by_name[KV].is_replicated
        self._deployment = linker_deployment(server_args, params, replicated, self.config.namespace)
        self._ranks = rank_and_size(params)[1]
        hooks.ensure_installed()
        self._store = NvmeStore(self.config)
        try:
            self._check_pages()
            self._path, self._why = choose_path(self.config, self._device, params, self._store)
        except BaseException:
            self._store.close()
            raise
        self._pages = {n: LayeredPages(self._store, p.geometry) for n, p in self._device.by_name.items()}
        self._namespaces: dict[tuple[str, int], Namespace] = {}
        self.pools = {PoolName(name): pool for name, pool in self._device.by_name.items()}
        self.layer_done_counter = LayerWiseLoadCounter(len(self._device.steps))
        self._loads = LoadQueue(
            self.layer_done_counter, self.metrics, step_s=self.config.read_deadline_s, threads=self.config.io_workers
        )
        self._offloads = OffloadQueue(
            self.metrics, limit_pages=self.config.linker_queue_pages, with_sums=self._device.by_name[KV].has_sums
        )
        self._queued: dict[str, list[Any]] = {}
        self._allocator = params.token_to_kv_pool_allocator
        self._close_lock = threading.Lock()
        self._is_closed = False
        LIVE.add(self)
        logger.info("sglang-hicache-ext: direct linker is open: %s", self.describe())

    def _check_pages(self) -> None:
        for pool in self._device.by_name.values():
            if not largest_batch(pool.geometry.page_bytes, self._store.layout.segment_bytes):
                raise ConfigError(
                    f"a page of {pool.geometry.page_bytes} bytes does not fit a segment of "
                    f"{self._store.layout.segment_bytes}",
                    "capacity",
                    "raise capacity or segment, or use a smaller --page-size",
                )

    def _namespace(self, pool: DevicePool) -> Namespace:
        """Namespace of the pages that are made and asked for now."""
        epoch = CURRENT.now
        known = self._namespaces.get((pool.name, epoch.number))
        if known is None:
            known = self._store.namespace(pool_fingerprint(self._deployment, pool, epoch))
            self._namespaces[pool.name, epoch.number] = known
            if len(self._namespaces) > MAX_NAMESPACES:
                self._namespaces.pop(min(self._namespaces, key=lambda k: k[1]))
        return known

    # ---- lookup

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Every prefix length in pages that all pools can restore; held against reclaim. From memory."""
        return self._guard.run("lookup", list, lambda: self._lookup(transfers))

    def _lookup(self, transfers: list[Any]) -> list[int]:
        by_name = {_name(t): t for t in transfers}
        keys = [key_bytes(k) for k in by_name[KV].keys or ()]
        if not keys or set(by_name) != set(self._device.by_name):
            return []
        present = {n: self._store.contains(self._namespace(p), keys) for n, p in self._device.by_name.items()}
        sidecars = [
            SidecarPresence(name, _trailing(transfer), present[name])
            for name, transfer in by_name.items()
            if name != KV
        ]
        found = fold(present[KV], sidecars, KV)
        self.metrics.add("linker_lookups")
        self.metrics.add("linker_hit_pages", found.hit_pages)
        for name, pool in self._device.by_name.items():
            there = [k for k, ok in zip(keys[: found.hit_pages], present[name], strict=False) if ok]
            self._store.hit_pages(self._namespace(pool), there, self.config.hold_s)
        return found.restorable

    # ---- loads

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load; it begins with the next ``start_layer_wise_loading``. The answer is the same on every rank."""
        wanted = [t for t in transfers if t.keys]
        if not wanted or any(_name(t) not in self._device.by_name for t in wanted) or rid in self._queued:
            return False
        self._queued[rid] = wanted
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Start every queued load; returns the counter's index, -1 when there is none."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index = int(self.layer_done_counter.update_producer())
        sources: dict[str, Source] = {}
        for name, pool in self._device.by_name.items():
            mine = [t for transfers in queued.values() for t in transfers if _name(t) == name]
            if mine:
                keys = [key_bytes(k) for t in mine for k in t.keys]
                slots = [t.device_indices for t in mine]
                ns = self._guard.run("namespace", lambda: None, lambda p=pool: self._namespace(p))  # type: ignore[misc]
                sources[name] = PoolLoad(pool, self._pages[name], ns, keys, slots, self._path, self._allocator)
        ready = get_device_module().Event()
        ready.record()
        self.metrics.add("linker_loading_requests", len(queued))
        self._loads.submit(Batch(index, sources, self._device.steps, ready))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Block until the batch writes no byte to device memory any more; True when every layer landed."""
        return self._guard.run("finish", bool, lambda: self._loads.finish(counter_index))

    # ---- offloads

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue a node's pages; False when the queue is full and SGLang offers the node again.

        With several ranks every rank must take the same branch: a full queue then answers with a failed offload.
        """
        return self._guard.run("offload", self._decline, lambda: self._offload(transfers))

    def _offload(self, transfers: list[Any]) -> bool:
        wanted = [t for t in transfers if t.keys and t.device_indices is not None and _name(t) in self._device.by_name]
        if not any(_name(t) == KV for t in wanted):
            return self._decline()
        parts = []
        for transfer in wanted:
            pool = self._device.by_name[_name(transfer)]
            if pool.is_replicated and not self._deployment.is_writer:
                continue
            keys = [key_bytes(k) for k in transfer.keys]
            parts.append(
                OffloadPart(pool, self._pages[pool.name], self._namespace(pool), keys, transfer.device_indices)
            )
        if not parts:
            self._offloads.settle(True)
            return True
        return self._offloads.offer(OffloadJob(parts, self.record_offload_ready())) or self._decline()

    def _decline(self) -> bool:
        if self._ranks == 1:
            return False
        self._offloads.settle(False)
        return True

    def num_completed_offloads(self) -> int:
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    # ---- life

    def reset(self) -> None:
        """Quiesce: nothing reads or writes a device slot after this. Stored pages stay."""
        self._queued.clear()
        self._guard.run("reset", lambda: None, lambda: self._quiesce(self.config.read_deadline_s))
        self.layer_done_counter.reset()

    def _quiesce(self, timeout_s: float) -> None:
        self._offloads.cancel_all()
        self._loads.stop_all(timeout_s + CLOSE_S)

    def close(self) -> None:
        """Idempotent and bounded; offloads that were accepted are finished if that is quick."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        LIVE.discard(self)
        self._queued.clear()
        self._guard.run("close", lambda: None, lambda: self._offloads.close(CLOSE_S))
        self._guard.run("close", lambda: None, self._loads.close)
        self._guard.run("close", lambda: None, self._path.close)
        self._guard.run("close", lambda: None, self._store.close)

    def describe(self) -> dict[str, Any]:
        """Requested and effective settings and all counters of this rank, JSON-ready."""
        stats, snapshot, own = self._store.stats(), self.metrics.snapshot(), self._store.metrics.snapshot()
        return {
            "backend": "linker",
            "disabled": self._guard.disabled,
            "path_requested": self.config.linker_path,
            "path": self._path.name,
            "path_reason": self._why,
            "path_details": self._path.describe(),
            "pools": {n: type(p.pool).__name__ for n, p in self._device.by_name.items()},
            "layers": len(self._device.steps),
            "page_bytes": {n: p.geometry.page_bytes for n, p in self._device.by_name.items()},
            "store": self._store.describe(),
            "pages": stats.pages,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "counters": {k: float(v) for k, v in {**stats.counters, **snapshot.counters}.items()},
            "read_outcomes": dict(own.outcomes),
            "write_outcomes": dict(own.writes),
            "moved": {"write_pages": float(snapshot.counters.get("linker_offloaded_pages", 0))},
            "queued_offload_pages": self._offloads.queued_pages,
            "hooks": hooks.health(),
            "weight_epoch": CURRENT.now.value,
        }


def _trailing(transfer: Any) -> int:
    return max(1, len(transfer.keys or ())) if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES else 0
