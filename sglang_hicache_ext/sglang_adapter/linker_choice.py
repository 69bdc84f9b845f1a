"""Which way the linker's bytes take, decided by trying, and why."""

from __future__ import annotations

from typing import Any

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.sglang_adapter.linker_paths import BouncePath, DirectPath, LoadPath
from sglang_hicache_ext.sglang_adapter.linker_pools import WHERE, DevicePools
from sglang_hicache_ext.sglang_adapter.linker_quarantine import allocator_of, can_quarantine
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore


def choose_path(config: HiCacheExtConfig, pools: DevicePools, params: Any, store: NvmeStore) -> tuple[LoadPath, str]:
    """(path, reason). ``auto`` falls back and says why.

    Raises:
        CapabilityError: a path that was asked for by name does not work here.
    """
    asked = config.linker_path
    order = {"auto": ("gds", "direct", "bounce")}.get(asked, (asked,))
    reasons = []
    for name in order:
        reason = _refusal(name, pools, params)
        if reason:
            reasons.append(f"{name}: {reason}")
            continue
        try:
            return _open(name, config, pools, store), "; ".join(reasons) or "asked for"
        except CapabilityError as error:
            reasons.append(f"{name}: {error}")
    raise CapabilityError(f"linker_path {asked!r} does not work here: {'; '.join(reasons)}", WHERE, "use auto")


def _refusal(name: str, pools: DevicePools, params: Any) -> str:
    """Why a path is out of the question; "" when it may be tried."""
    device = pools.by_name["kv"].device.type
    guarded = all(can_quarantine(allocator_of(params.token_to_kv_pool_allocator, n)) for n in pools.by_name)
    if name == "gds":
        return "" if device == "cuda" else f"the pools are in {device} memory"
    if name == "direct":
        if device != "cpu":
            return f"the pools are in {device} memory"
        if not guarded:
            return "the allocator cannot withhold pages that are still written to"
        return "" if all(p.is_aligned for p in pools.by_name.values()) else "the pools are not aligned to 4 KiB"
    return ""


def _open(name: str, config: HiCacheExtConfig, pools: DevicePools, store: NvmeStore) -> LoadPath:
    if name == "direct":
        return DirectPath()
    if name == "bounce":
        return BouncePath(list(pools.by_name.values()), slots=2 * config.io_workers)
    from sglang_hicache_ext.sglang_adapter.linker_gds import GdsPath

    return GdsPath(store, list(pools.by_name.values()), depth=config.io_depth)
