"""The one frozen config tree and its parser.

Keys are flat, beside SGLang's own in ``--hicache-storage-backend-extra-config``. Unknown keys are
refused with the nearest known one, values are never coerced, sizes are bytes or text like "64GiB".
Parsing imports no driver, so a frontend can run it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sglang_hicache_ext.errors import ConfigError

SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "tp_lcm_size",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "file_storage_path",
        "allocator",
        "extra_backend_tag",
    }
)
"""Keys that SGLang reads from the same object (sglang 0.5.23 hybrid_cache_controller.py:377-438)."""

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")

MIB, GIB = 1 << 20, 1 << 30


def parse_size(value: Any, key: str) -> int:
    """Bytes from an int or text such as "64GiB", "500MB". Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{key} must not be negative, got {value}", "config", 'write bytes or text like "64GiB"')
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{key} is not a size: {value!r}", "config", 'write bytes or text like "64GiB"')
    return int(float(match.group(1)) * unit)


def _opt(
    default: Any,
    doc: str,
    *,
    kind: str = "",
    allowed: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A config field: default, one line of documentation, and how its value is checked."""
    meta = {"doc": doc, "kind": kind, "allowed": allowed, "low": low, "high": high}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default, metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True, slots=True)
class HiCacheExtConfig:
    """Every option of the package. ``docs/configuration.md`` is generated from this class."""

    path: tuple[str, ...] = _opt(
        (), "Directory or list of directories (drives) of the NVMe store; made 0700 when missing.", kind="paths"
    )
    capacity: int = _opt(
        64 * GIB, "Bytes the store may use on disk, all directories and the index together.", kind="size"
    )
    engine: str = _opt(
        "auto",
        "I/O engine; auto probes the real directory with a real page.",
        allowed=("auto", "io_uring", "posix", "kvikio", "aiofiles"),
    )
    durability: str = _opt(
        "process",
        "process: a published page survives kill -9. device: also power loss (fdatasync before publish).",
        allowed=("process", "device"),
    )
    segment: int = _opt(0, "Bytes of a segment file; 0 chooses from the capacity (16 MiB to 1 GiB).", kind="size")
    io_depth: int = _opt(32, "Operations in flight per I/O thread.", kind="int", low=1, high=4096)
    read_deadline_s: float = _opt(
        10.0, "Seconds one read batch may take before its rest counts as late.", kind="seconds", low=0.001, high=3600
    )
    write_deadline_s: float = _opt(
        30.0, "Seconds one write batch may take before its rest is given up.", kind="seconds", low=0.001, high=3600
    )
    hold_s: float = _opt(
        60.0, "Seconds a page counted as a hit is held against reclaim.", kind="seconds", low=0, high=3600
    )
    reinsert: bool = _opt(
        True, "Keep pages that were read since they were written when their segment is reclaimed.", kind="bool"
    )
    namespace: str = _opt("", "Added to the fingerprint, to keep deployments apart; never replaces it.", kind="str")
    register_host_pool: bool = _opt(
        True, "Register SGLang's host pool with the engine when the limits allow it.", kind="bool"
    )
    retry_failed_writes: int = _opt(
        4096,
        "Refused or failed page writes remembered so that holes are rewritten; 0 turns it off.",
        kind="int",
        low=0,
        high=1 << 20,
    )

    kv_events: bool = _opt(
        False,
        "Tell KV-aware routers of stored and removed L3 pages, in the stream of --kv-events-config; see docs/kv_events.md.",
        kind="bool",
    )

    pipeline: str = _opt(
        "sglang",
        "extension: our prefetch pipeline serves KV pools inside SGLang. sglang: nothing of SGLang is touched.",
        allowed=("sglang", "extension"),
    )
    prefetch_policy: str = _opt(
        "",
        "Overrides SGLang's policy when pipeline is extension; empty keeps it.",
        allowed=("", "best_effort", "timeout", "wait_complete", "deadline"),
    )
    wait_complete_cap_s: float = _opt(
        60.0, "Hard cap of wait_complete, so that it never hangs.", kind="seconds", low=0.001, high=86400
    )
    io_workers: int = _opt(2, "I/O worker threads of the extension pipeline.", kind="int", low=1, high=64)
    prefill_tokens_per_s: float = _opt(
        0.0, "Prefill rate for the deadline policy; 0 measures it.", kind="number", low=0, high=1e9
    )

    linker_path: str = _opt(
        "auto",
        "How the direct linker moves bytes. direct: into host-visible pools. bounce: pinned memory and a copy. gds: kvikio.",
        allowed=("auto", "direct", "bounce", "gds"),
    )
    linker_queue_pages: int = _opt(
        4096,
        "Pages the direct linker keeps waiting for their write; more are declined and offered again.",
        kind="int",
        low=1,
        high=1 << 20,
    )

    master: str = _opt(
        "",
        "Mooncake master of the remote tier: host:port, or etcd://host:port;host:port with several masters.",
        kind="str",
    )
    metadata: str = _opt("P2PHANDSHAKE", "Mooncake's metadata server; peer to peer by default.", kind="str")
    transport: str = _opt(
        "auto",
        "auto: rdma where a port is active, tcp elsewhere. rdma fails at start without one. One choice per cluster.",
        allowed=("auto", "rdma", "tcp"),
    )
    rdma_devices: str = _opt("", "RDMA devices for Mooncake, comma separated; empty lets it choose.", kind="str")
    remote_host: str = _opt("", "Own address as peers reach it; empty takes the one that routes to master.", kind="str")
    remote_deadline_s: float = _opt(
        2.0, "Seconds one remote transfer may take; its lane is then quarantined.", kind="seconds", low=0.01, high=600
    )
    staging: int = _opt(256 * MIB, "Bytes of the private staging ring of a process.", kind="size")
    remote_lanes: int = _opt(
        4, "Remote transfers at once; the staging ring is shared out to them.", kind="int", low=2, high=64
    )
    remote_copy_threads: int = _opt(
        0, "Threads that verify and copy pages out of the ring; 0 chooses by the cores.", kind="int", low=0, high=64
    )
    remote_replicas: int = _opt(1, "Copies of each page in the remote pool.", kind="int", low=1, high=16)
    remote_zero_copy: bool = _opt(
        False,
        "Let Mooncake write straight into host pages. A late transfer then keeps host pages out of use; see docs/remote.md.",
        kind="bool",
    )
    remote_log: str = _opt("", "File for Mooncake's own log lines; empty drops them.", kind="str")
    tenant: str = _opt("default", "Name of the tenant; its secret names its pages.", kind="str")
    tenant_secret_file: str = _opt(
        "", "File whose bytes are the tenant's secret; empty means none: anyone can name the pages.", kind="str"
    )
    on_unavailable: str = _opt(
        "fail",
        "When the remote tier cannot be reached at start. fail: refuse to start. degrade: start without it, keep trying.",
        allowed=("fail", "degrade"),
    )
    remote_write_policy: str = _opt(
        "all",
        "Which pages a tiered store sends on to the remote tier. hot: pages that were read again.",
        allowed=("all", "hot", "none"),
    )
    remote_queue_pages: int = _opt(
        8192,
        "Pages waiting to be sent to the remote tier or kept on NVMe; more are dropped.",
        kind="int",
        low=1,
        high=1 << 20,
    )
    near_admission: str = _opt(
        "second",
        "Which remote pages a tiered store keeps on NVMe. second: while there is room, then from their second read on.",
        allowed=("all", "second", "none"),
    )
    arbiter: str = _opt(
        "", "Name of the shared-memory arbiter of the NIC or drive, for example mlx5_0; empty uses none.", kind="str"
    )
    arbiter_rate: int = _opt(
        0, "Bytes per second that prefetch and backup may use together; 0 only orders them.", kind="size"
    )

    pd_transport: str = _opt(
        "nixl", "Who moves pages from prefill to decode. Both sides must use the same.", allowed=("nixl", "mooncake")
    )
    pd_group: int = _opt(
        4 * MIB, "Least bytes of a layer group of a PD transfer; a single layer is never cut.", kind="size"
    )
    pd_layered_min: int = _opt(8 * MIB, "A prefill chunk of fewer bytes is sent whole, after its forward.", kind="size")
    pd_deadline_s: float = _opt(
        60.0,
        "Seconds a PD transfer may take; what it left unsettled stays in quarantine.",
        kind="seconds",
        low=0.01,
        high=3600,
    )
    pd_drain_s: float = _opt(
        2.0,
        "Seconds after a peer's proven end in which its last bytes may still arrive.",
        kind="seconds",
        low=0,
        high=60,
    )
    pd_ucx: str = _opt(
        "", "UCX engine configuration of the PD agent, for example TLS=tcp,NET_DEVICES=eth0.", kind="str"
    )
    pd_max_open: int = _opt(4096, "PD transfers open at a time; more are refused.", kind="int", low=1, high=1 << 20)

    sglang: Mapping[str, Any] = _opt({}, "SGLang's own keys of the same object, as they came.", kind="internal")

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "--hicache-storage-backend-extra-config") -> HiCacheExtConfig:
        """Check and freeze ``raw``. Raises ConfigError naming the key, the value and what to write instead."""
        known = {f.name: f for f in fields(cls) if f.metadata["kind"] != "internal"}
        values: dict[str, Any] = {}
        for key, value in raw.items():
            if key in known:
                values[key] = _check(key, value, known[key].metadata, where)
            elif key not in SGLANG_KEYS:
                near = difflib.get_close_matches(key, [*known, *SGLANG_KEYS], n=1, cutoff=0.5)
                todo = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise ConfigError(f"unknown key {key!r}", where, todo)
        values["sglang"] = {k: v for k, v in raw.items() if k in SGLANG_KEYS}
        return cls(**values)


def _check(key: str, value: Any, meta: Mapping[str, Any], where: str) -> Any:
    kind, allowed = meta["kind"], meta["allowed"]
    if allowed:
        if not isinstance(value, str) or value not in allowed:
            raise ConfigError(f"{key} is {value!r}", where, f"write one of: {', '.join(repr(a) for a in allowed)}")
        return value
    if kind == "size":
        return parse_size(value, key)
    if kind == "paths":
        return _check_paths(key, value, where)
    expected: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "seconds": (int, float),
        "number": (int, float),
        "bool": (bool,),
        "str": (str,),
    }
    if not isinstance(value, expected[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(
            f"{key} is {value!r} ({type(value).__name__})",
            where,
            f"write a {kind}, without quotes" if kind != "str" else "write a text",
        )
    low, high = meta["low"], meta["high"]
    if low is not None and not low <= value <= high:
        raise ConfigError(f"{key} is {value!r}", where, f"write a value from {low} to {high}")
    return float(value) if kind in ("seconds", "number") and isinstance(value, (int, float)) else value


def _check_paths(key: str, value: Any, where: str) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, (list, tuple)) or not paths or not all(isinstance(p, str) and p for p in paths):
        raise ConfigError(f"{key} is {value!r}", where, 'write a directory or a list of directories, "/mnt/nvme0/kv"')
    if len(set(paths)) != len(paths):
        raise ConfigError(f"{key} names a directory twice: {value!r}", where, "write each drive once")
    return tuple(paths)
