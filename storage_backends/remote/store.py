"""RemoteStore: a PageStore in Mooncake Store, made safe to read from.

A worker process owns Mooncake's client and can reach nothing but a private staging ring; pages are proven where they are
delivered; a transfer that runs late costs its lane, never a host page; a run of them costs the worker, which is killed and
replaced. See docs/remote.md for what Mooncake itself does not protect.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.arbiter import Arbiter
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import CapabilityError, ConfigError, StoreClosedError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.page import Regions, check_rows
from sglang_hicache_ext.ports import Clock, Namespace, ReadResult, StoreStats, SystemClock, WriteResult
from sglang_hicache_ext.storage_backends.remote import capability, reading, writing
from sglang_hicache_ext.storage_backends.remote.absence import classify
from sglang_hicache_ext.storage_backends.remote.client import ObjectClient
from sglang_hicache_ext.storage_backends.remote.direct import HostMemory
from sglang_hicache_ext.storage_backends.remote.handshake import WrongSecretError, shake_hands
from sglang_hicache_ext.storage_backends.remote.link import Link
from sglang_hicache_ext.storage_backends.remote.process import (
    MOONCAKE,
    ProcessWorker,
    StartError,
    ThreadWorker,
    WorkerLife,
    WorkerSpec,
)
from sglang_hicache_ext.storage_backends.remote.wire import ObjectNames

logger = logging.getLogger(__name__)


class RemoteStore:
    """A PageStore over the network. Thread-safe; calls from several threads use different lanes.

    Args:
        config: ``master`` is required; see the config tree for the rest.
        clock: for breakers and caches; transfers are timed by the system's clock.
        engine, engine_path: the ObjectEngine in the worker, "module:class", and where to import it from. For tests.
        in_process: run the worker as threads here. For measurements; it cannot be killed.
        arbiter: shared with PD; None opens the one that ``config.arbiter`` names, if any.

    Raises:
        ConfigError, CapabilityError: at construction only, naming the address and what to check; with
            ``on_unavailable: degrade`` an unreachable cluster does not raise but starts as a store of misses.
    """

    def __init__(
        self, config: HiCacheExtConfig, *, clock: Clock | None = None, engine: str = MOONCAKE,
        engine_path: tuple[str, ...] = (), in_process: bool = False,
        arbiter: Arbiter | None = None,
    ) -> None:  # fmt: skip
        if not config.master:
            raise ConfigError(
                "master is not set", capability.WHERE, 'write "master": "host:port" of the mooncake_master'
            )
        capability.master_addresses(config.master)
        if config.staging // (2 * config.remote_lanes) < 1 << 16:
            raise ConfigError(f"staging {config.staging} is too small for {config.remote_lanes} lanes", capability.WHERE,
                              "64 KiB per half lane at least; two pages are better")  # fmt: skip
        self._config = config
        self.transport = capability.choose_transport(config)
        self._names = ObjectNames(config.tenant, capability.read_secret(config))
        self._spec = self._worker_spec(engine, engine_path)
        self._life = ThreadWorker if in_process or config.remote_zero_copy else ProcessWorker
        self._host = HostMemory() if config.remote_zero_copy else None
        self.metrics = Metrics()
        self.warning = ""
        self._closed = False
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}
        clock = clock or SystemClock()
        client = ObjectClient(self._start_worker, clock, self.metrics, drain_s=config.remote_deadline_s)
        owns_arbiter = arbiter is None
        if arbiter is None and config.arbiter:
            arbiter = Arbiter(config.arbiter, config.arbiter_rate)
        self._arbiter, self._owns_arbiter = arbiter, owns_arbiter
        self._link = Link(config, client, self._names, clock, self.metrics, arbiter, self._host)
        self._connect()

    def _worker_spec(self, engine: str, engine_path: tuple[str, ...]) -> WorkerSpec:
        c = self._config
        settings = {
            "host": capability.own_address(c), "metadata": c.metadata, "transport": self.transport.effective,
            "devices": c.rdma_devices, "master": c.master, "replicas": c.remote_replicas, "log": c.remote_log,
        }  # fmt: skip
        return WorkerSpec(engine, settings, c.staging, c.remote_lanes, engine_path, c.remote_log)

    def _start_worker(self) -> WorkerLife:
        if self._spec.engine == MOONCAKE and (reason := capability.unreachable(self._config.master)):
            raise StartError(f"master {self._config.master} cannot be reached: {reason}")
        worker = self._life(self._spec)
        try:
            self.warning = shake_hands(worker, self._names, self._config, self.transport.effective).warning
        except BaseException:
            worker.kill(5.0)
            raise
        if isinstance(worker, ThreadWorker) and self._host is not None:
            for addr, nbytes in self._host.ranges():
                worker.register(addr, nbytes)
        if self.warning:
            logger.warning("remote tier: %s", self.warning)
        return worker

    def _connect(self) -> None:
        try:
            self._link.client.connect()
        except StartError as error:
            if "ModuleNotFoundError: No module named 'mooncake'" in str(error):
                raise CapabilityError(
                    "the mooncake package is not installed", capability.WHERE,
                    "pip install mooncake-transfer-engine (or -non-cuda without CUDA)",
                ) from error  # fmt: skip
            if self._config.on_unavailable == "fail" or isinstance(error, WrongSecretError):
                raise ConfigError(
                    str(error), capability.WHERE,
                    "check that mooncake_master runs there and a store node is connected; "
                    "or write on_unavailable: degrade to start without this tier",
                ) from error  # fmt: skip
            self.warning = str(error)
            self._link.client.last_error = self.warning
            self.metrics.set("remote_up", 0)
            logger.warning("remote tier is off and will be retried: %s", error)

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        self._check_open()
        ns = Namespace(fingerprint.namespace_id, fingerprint)
        with self._lock:
            return self._namespaces.setdefault(ns.id, ns)

    def namespaces(self) -> list[Namespace]:
        """Every namespace registered with this process, the oldest first."""
        with self._lock:
            return list(self._namespaces.values())

    def contains(self, ns: Namespace, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """One query per NAMES_PER_ASK keys, answered by the master's memory. False for all when it cannot be asked."""
        self._check_open()
        return np.asarray(self._present(self._names.names(ns.id, list(keys))), np.bool_)

    def _present(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        found = self._link.exist(names) or [False] * len(names)
        if any(found):
            futile = self._link.unreadable(names)
            found = [f and not u for f, u in zip(found, futile, strict=True)]
        return found

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        """Leading keys present. The query itself renews Mooncake's lease on them (the master's --default_kv_lease_ttl)."""
        self._check_open()
        hits = 0
        for start in range(0, len(keys), 512):
            found = self._present(self._names.names(ns.id, list(keys[start : start + 512])))
            run = found.index(False) if False in found else len(found)
            hits += run
            if run < len(found):
                break
        return hits

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        """Read pages; without ``deadline_s`` each 128 pages have ``remote_deadline_s``. Never leaves a page draining."""
        self._check_call(keys, regions)
        started = time.monotonic()
        result = reading.read(self._link, ns, self.namespaces(), keys, regions, deadline_s)
        self.metrics.observe("read_batch_seconds", time.monotonic() - started)
        self.metrics.pages(result.outcomes)
        self.metrics.add("read_bytes", sum(o is Outcome.LOADED for o in result.outcomes) * regions.page_bytes)
        return result

    def write(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> WriteResult:
        """Write pages; FULL while the pool has no room, at once and without a copy while backing off."""
        self._check_call(keys, regions)
        started = time.monotonic()
        result = writing.write(self._link, ns, keys, regions, deadline_s)
        self.metrics.observe("write_batch_seconds", time.monotonic() - started)
        self.metrics.writes(result.outcomes)
        self.metrics.add("written_bytes", result.outcomes.count(WriteOutcome.STORED) * regions.page_bytes)
        return result

    def register_memory(self, addr: int, nbytes: int) -> bool:
        """Offer host memory for zero-copy reads; False, and nothing done, unless ``remote_zero_copy`` is on."""
        self._check_open()
        worker = self._link.client.worker
        if self._host is None or not isinstance(worker, ThreadWorker) or worker.register(addr, nbytes) < 0:
            return False
        self._host.add(addr, nbytes)
        return True

    def unregister_memory(self, addr: int) -> None:
        """Take no more zero-copy reads there. Mooncake keeps its own registration until the client ends."""
        if self._host is not None:
            self._host.discard(addr)

    def why_absent(self, ns: Namespace, keys: Sequence[bytes]) -> tuple[Outcome, ...]:
        """ABSENT, EVICTED (this process saw it), MISMATCH (under another namespace of this process) or LOADED."""
        return tuple(outcome for outcome, _ in self.explain(ns, keys))

    def explain(self, ns: Namespace, keys: Sequence[bytes]) -> list[tuple[Outcome, str]]:
        """``why_absent`` with one sentence per key; a MISMATCH names the differing fields."""
        self._check_open()
        out = [(Outcome.LOADED, "present")] * len(keys)
        rows = [i for i, f in enumerate(self._present(self._names.names(ns.id, list(keys)))) if not f]
        told = classify(self._link, ns, self.namespaces(), [keys[i] for i in rows])
        for row, answer in zip(rows, told, strict=True):
            out[row] = answer
        return out

    def remove(self, ns: Namespace, keys: Sequence[bytes]) -> int:
        self._check_open()
        names = self._names.names(ns.id, list(dict.fromkeys(keys)))
        codes = [c for i in range(0, len(names), 1024) for c in self._link.ask("remove", names[i : i + 1024]) or ()]
        self._link.history.discard(names)
        return sum(c == 0 for c in codes)

    def clear(self, ns: Namespace | None = None) -> int:
        """Forget the pages of ``ns``, or of every namespace registered with this process. Other tenants' pages stay."""
        self._check_open()
        targets = [ns] if ns is not None else self.namespaces()
        counts = [self._link.ask("remove_prefix", self._names.prefix(t.id), timeout_s=30.0) for t in targets]
        self._link.history.clear()
        return sum(c for c in counts if c is not None and c > 0)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Writes are in the pool when ``write`` returns; how durable that is, is the pool's own setting."""
        self._check_open()
        return True

    @property
    def is_healthy(self) -> bool:
        """False while the tier is down or refused; SGLang then runs without it."""
        return self._link.client.is_up and self._link.is_closed

    @property
    def client_worker(self) -> WorkerLife | None:
        """The worker in use; for tools that account for its process."""
        return self._link.client.worker

    def stats(self) -> StoreStats:
        """Pages and bytes belong to the whole cluster and are not asked for here: 0. See the master's own metrics."""
        self._check_open()
        self.metrics.set("remote_healthy", self.is_healthy)
        snapshot = self.metrics.snapshot()
        return StoreStats(0, 0, 0, {**snapshot.counters, **snapshot.gauges})

    def describe(self) -> dict[str, Any]:
        c, t = self._config, self.transport
        return {
            "store": "remote", "engine": self._spec.engine.rpartition(":")[2], "master": c.master,
            "is_healthy": self.is_healthy, "warning": self.warning, "tenant": c.tenant,
            "has_tenant_secret": bool(c.tenant_secret_file), "replicas": c.remote_replicas,
            "transport": {"requested": t.requested, "effective": t.effective, "reason": t.reason},
            "isolation": "thread" if self._life is ThreadWorker else "process",
            "zero_copy": c.remote_zero_copy, "staging_bytes": c.staging, "lanes": c.remote_lanes, "deadline_s": c.remote_deadline_s,
            "breaker": str(self._link.backend.state), "peers": self._link.peers.states(),
            "client": self._link.client.describe(), "arbiter": self._arbiter.describe() if self._arbiter else None,
        }  # fmt: skip

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._link.client.close()
        self._link.copier.close()
        if self._owns_arbiter and self._arbiter is not None:
            self._arbiter.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the remote store is closed")

    def _check_call(self, keys: Sequence[bytes], regions: Regions) -> None:
        self._check_open()
        check_rows(keys, regions)
