"""The storage backend that SGLang sees: ``HiCacheStorage`` over a page store.

SGLang calls it from its storage threads and, for queries, statistics and control, from the scheduler thread. Nothing
here raises on the data path: what goes wrong is a miss or a refused write, counted and logged.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.durability import DurablePrefix
from sglang_hicache_ext.errors import ConfigError, HiCacheExtError
from sglang_hicache_ext.keys import key_bytes
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.sglang_adapter import compat, hooks, pipeline_hook
from sglang_hicache_ext.sglang_adapter.channel import PoolChannel
from sglang_hicache_ext.sglang_adapter.epoch import CURRENT
from sglang_hicache_ext.sglang_adapter.exporting import open_export
from sglang_hicache_ext.sglang_adapter.generic import GenericPages
from sglang_hicache_ext.sglang_adapter.guard import Guard
from sglang_hicache_ext.sglang_adapter.host_pool import open_pool, pool_buffers
from sglang_hicache_ext.sglang_adapter.identity import deployment_of, server_args
from sglang_hicache_ext.sglang_adapter.kv_events import KvEvents, open_kv_events
from sglang_hicache_ext.sglang_adapter.page_hash import PageHashWarmUp
from sglang_hicache_ext.sglang_adapter.pools_v2 import Fold, SidecarPresence, fold
from sglang_hicache_ext.sglang_adapter.retry import WriteRetry
from sglang_hicache_ext.sglang_adapter.stats import TransferStats
from sglang_hicache_ext.sglang_adapter.stores import open_named_store

logger = logging.getLogger(__name__)

KV = "kv"
LIVE: weakref.WeakSet[HiCacheExtStorage] = weakref.WeakSet()
"""Backends of this process that are open."""


def pool_name(name: Any) -> str:
    """Plain text of SGLang's pool name."""
    return str(getattr(name, "value", name))


class HiCacheExtStorage(HiCacheStorage):  # type: ignore[misc]
    """A HiCache L3 on one of our stores.

    Args:
        storage_config: SGLang's HiCacheStorageConfig; its extra_config holds our keys.
        kwargs: always empty; part of SGLang's contract for ``dynamic`` backends.

    Raises:
        ConfigError, CapabilityError: bad input, in one message that says what to write instead.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        try:
            self._open(storage_config)
        except HiCacheExtError as error:
            logger.critical("sglang-hicache-ext refuses to start: %s", error)
            raise

    def _open(self, storage_config: Any) -> None:
        compat.require_sglang()
        extra = dict(storage_config.extra_config or {})
        _check_interface(extra)
        _warn_of_allocator(extra)
        self.config = HiCacheExtConfig.parse(extra)
        page_hash = PageHashWarmUp()
        self._deployment = deployment_of(storage_config, self.config.namespace)
        self.metrics = Metrics()
        self._guard = Guard(self.metrics)
        self._stats = TransferStats()
        self._channels: dict[str, PoolChannel] = {}
        self._generic: GenericPages | None = None
        self._registered_memory: list[int] = []
        self._close_lock = threading.Lock()
        self._is_closed = False
        hooks.ensure_installed()
        if self.config.pipeline == "extension":
            pipeline_hook.install_pipeline_hook()
        self.backend_name = str(extra.get("backend_name", "nvme"))
        self.store = open_named_store(self.backend_name, self.config)
        self._retry = WriteRetry(self.store, self.metrics, self.config.retry_failed_writes)
        try:
            self.kv_events: KvEvents | None = open_kv_events(self)
        except ConfigError:
            self.store.close()
            raise
        self._export = open_export(self, storage_config)
        page_hash.wait()
        LIVE.add(self)
        logger.info("sglang-hicache-ext: store %s is open: %s", self.backend_name, self.store.describe())

    # ---- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The anchor (KV) pool. Raises CapabilityError when its pages cannot be reached."""
        self.mem_pool_host = mem_pool_host
        self._add_channel(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A side pool, or the anchor once more. Raises CapabilityError as above: an unknown pool is never skipped."""
        name = pool_name(host_pool_name)
        known = self._channels.get(name)
        if known is None or known.pool is not host_pool:
            self._add_channel(name, host_pool)

    def _add_channel(self, name: str, pool: Any) -> None:
        pages = open_pool(pool, name)
        self._channels[name] = PoolChannel(
            name,
            pool,
            pages,
            store=self.store,
            deployment=self._deployment,
            epoch=CURRENT,
            retry=self._retry,
            stats=self._stats,
        )
        if name == KV and pages is not None:
            self._generic = GenericPages(self._channels[KV], self.store)
            if self.kv_events is not None:
                self.kv_events.start(self._channels[KV])
        self._register_memory(pool)

    def _register_memory(self, pool: Any) -> None:
        register = getattr(self.store, "register_memory", None)
        if register is None or not self.config.register_host_pool:
            return
        for addr, nbytes in pool_buffers(pool):
            if addr not in self._registered_memory and self._guard.run(
                "register_memory",
                bool,
                lambda a=addr, n=nbytes: bool(register(a, n)),  # type: ignore[misc]
            ):
                self._registered_memory.append(addr)

    # ---- v1: zero copy

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Leading pages present; held against reclaim. From memory, for any number of keys."""
        return self._guard.run("batch_exists", int, lambda: self._channels[KV].hit_pages(keys, self.config.hold_s))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the KV pool."""
        return self._pages("batch_get_v1", keys, lambda: self._channels[KV].read(keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Write pages of the KV pool."""
        return self._pages("batch_set_v1", keys, lambda: self._channels[KV].write(keys, host_indices))

    def _pages(self, name: str, keys: Sequence[str], call: Callable[[], list[bool]]) -> list[bool]:
        return self._guard.run(name, lambda: [False] * len(keys), call)

    # ---- v2: side pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Every prefix length that all pools together can restore."""
        transfers = list(pool_transfers or [])
        return self._guard.run("batch_exists_v2", PoolTransferResult.empty, lambda: self._exists_v2(keys, transfers))

    def _exists_v2(self, keys: list[str], transfers: list[Any]) -> PoolTransferResult:
        sidecars = [self._presence(keys, t) for t in transfers if t.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        found = fold(self._channels[KV].present(keys), sidecars, KV)
        self._hold(keys, sidecars, found)
        names = {pool_name(t.name): t.name for t in transfers}
        return PoolTransferResult(
            found.hit_pages, {names.get(n, n): pages for n, pages in found.boundaries.items()}, found.restorable
        )

    def _presence(self, keys: list[str], transfer: Any) -> SidecarPresence:
        name = pool_name(transfer.name)
        trailing = max(1, len(transfer.keys or ())) if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES else 0
        return SidecarPresence(name, trailing, self._channels[name].present(keys))

    def _hold(self, keys: list[str], sidecars: Sequence[SidecarPresence], found: Fold) -> None:
        self._channels[KV].hit_pages(keys[: found.hit_pages], self.config.hold_s)
        for sidecar in sidecars:
            there = [k for k, ok in zip(keys[: found.hit_pages], sidecar.present, strict=False) if ok]
            self._channels[sidecar.name].hit_pages(there, self.config.hold_s)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Read pages of side pools: one full-length list for every pool that was asked for."""
        return {t.name: self._transfer("batch_get_v2", t, PoolChannel.read) for t in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Write pages of side pools: one full-length list for every pool that was given."""
        return {t.name: self._transfer("batch_set_v2", t, PoolChannel.write) for t in transfers}

    def _transfer(self, name: str, transfer: Any, move: Callable[..., list[bool]]) -> list[bool]:
        keys = list(transfer.keys or [])
        return self._pages(
            name, keys, lambda: move(self._channels[pool_name(transfer.name)], keys, transfer.host_indices)
        )

    # ---- generic: flat tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read one flat page into ``target_location``; None on a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read flat pages into the given tensors; None per miss."""
        return self._guard.run(
            "batch_get", lambda: [None] * len(keys), lambda: self._flat().read(keys, target_locations)
        )

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write one flat page."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write flat pages; True when all are stored."""
        return self._guard.run(
            "batch_set", bool, lambda: self._flat().write(keys, values if values is not None else target_locations)
        )

    def exists(self, key: str) -> bool:
        """Say whether one flat page is stored."""
        return self._guard.run("exists", bool, lambda: self._flat().exists(key))

    def _flat(self) -> GenericPages:
        if self._generic is None:
            raise ValueError("flat pages need a KV pool with bytes")
        return self._generic

    # ---- control

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call, or None. Called on every scheduler iteration."""
        if self._export is not None:
            self.guarded("tick", self._export.tick)
        return self._guard.run("get_stats", lambda: None, self._stats.take)

    def guarded(self, name: str, call: Callable[[], None]) -> None:
        """Run ``call`` as the data path is run, also when the extension is off: what it raises is counted and logged."""
        self._guard.run(name, lambda: None, call, even_off=True)

    @property
    def disabled(self) -> str:
        """Why the extension switched itself off; "" while it works."""
        return self._guard.disabled

    @property
    def draining_pages(self) -> int:
        """Host pages withheld until late I/O into them is over."""
        return sum(c.draining_pages for c in list(self._channels.values()))

    @property
    def retry_pages(self) -> int:
        """Refused or failed page writes waiting for their next chance."""
        return self._retry.pending_pages

    def oldest_inflight_s(self) -> float:
        """Seconds that the longest call into the store runs already; 0.0 when none runs."""
        return self._guard.oldest_inflight("export")[1]

    def durable_prefix(self, keys: Sequence[str]) -> DurablePrefix:
        """A handle on ``keys``, SGLang's page hashes of a prefix in order: tells when other processes can rely on them.

        A True of ``batch_set_v1`` may mean "kept for another try"; this one never does.
        """
        return DurablePrefix(self.store, self._channels[KV].namespace, [key_bytes(k) for k in keys])

    def clear(self) -> bool:
        """Forget this rank's pages, of every pool and every epoch of this process; safe while I/O runs."""
        return self._guard.run("clear", bool, self._clear)

    def _clear(self) -> bool:
        self._retry.clear()
        for channel in list(self._channels.values()):
            for ns in channel.namespaces:
                self.store.clear(ns)
        return True

    def describe(self) -> dict[str, Any]:
        """Requested and effective settings and all counters of this rank, JSON-ready."""
        stats, snapshot = self.store.stats(), self.metrics.snapshot()
        store_metrics = getattr(self.store, "metrics", None)
        store_snapshot = store_metrics.snapshot() if store_metrics is not None else None
        return {
            "backend": self.backend_name,
            "disabled": self.disabled,
            "hooks": hooks.health(),
            "store": self.store.describe(),
            "pages": stats.pages,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "counters": {k: float(v) for k, v in {**stats.counters, **snapshot.counters}.items()},
            "read_outcomes": dict(store_snapshot.outcomes) if store_snapshot else {},
            "write_outcomes": dict(store_snapshot.writes) if store_snapshot else {},
            "moved": self._stats.totals(),
            "pools": {n: c.pages.form if c.pages is not None else "logical" for n, c in self._channels.items()},
            "draining_pages": self.draining_pages,
            "retry_pages": self.retry_pages,
            "weight_epoch": CURRENT.now.value,
            "kv_events_pages": self.kv_events.announced_pages if self.kv_events is not None else None,
            "pipeline": pipeline_hook.state_of(self),
        }

    def close(self) -> None:
        """Idempotent and bounded; never raises. Calls still running end as misses."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        LIVE.discard(self)
        if self._export is not None:
            self._export.close()
        if self.kv_events is not None:
            self.kv_events.close()
        unregister = getattr(self.store, "unregister_memory", None)
        self._guard.run("close", lambda: None, self._retry.close, even_off=True)
        for addr in self._registered_memory if unregister is not None else ():
            self._guard.run("close", lambda: None, lambda a=addr: unregister(a), even_off=True)  # type: ignore[misc]
        self._guard.run("close", lambda: None, self.store.close, even_off=True)


def _warn_of_allocator(extra: dict[str, Any]) -> None:
    """Source: sglang 0.5.23 srt/mem_cache/pool_host/common.py:125-140 (reads ``allocator`` before we exist)."""
    args = server_args()
    if args is None or "allocator" not in extra:
        return
    is_inline = not str(args.hicache_storage_backend_extra_config or "").startswith("@")
    if args.hicache_storage_backend != "dynamic" or not is_inline:
        logger.warning("allocator has no effect: SGLang reads it for `dynamic` with inline JSON only")


def _check_interface(extra: dict[str, Any]) -> None:
    if not extra.get("interface_v1"):
        raise ConfigError(
            "interface_v1 is missing, so SGLang would copy every page through a temporary tensor",
            "--hicache-storage-backend-extra-config",
            'write "interface_v1": 1 beside "backend_name", or start with --hicache-storage-backend nvme',
        )
