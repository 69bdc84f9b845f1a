"""Which SGLang this adapter works with, and what is missing when it does not.

Importing this module needs neither sglang nor torch: absence is an answer, not an exception.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from sglang_hicache_ext.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the table: versions from ``low`` up to, not including, ``high``."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    state: str
    note: str


SUPPORT = (
    Support((0,), (0, 5, 22), "refused", "an exception of any storage backend ends SGLang's storage threads for good"),
    Support((0, 5, 22), (0, 5, 23), "expected", "the storage interface is the same; not run by our tests"),
    Support((0, 5, 23), (0, 5, 24), "tested", "every test of this repository runs on it"),
    Support((0, 5, 24), (99,), "unknown", "used as long as every probed attribute is there"),
)
"""Source: sglang wheels 0.5.20 to 0.5.23, srt/managers/cache_controller.py and srt/mem_cache/hicache_storage.py."""

PROBES = (
    ("sglang.srt.mem_cache.hicache_storage", "HiCacheStorage.batch_get_v1"),
    ("sglang.srt.mem_cache.hicache_storage", "HiCacheStorage.batch_get_v2"),
    ("sglang.srt.mem_cache.hicache_storage", "HiCacheStorage.register_mem_host_pool_v2"),
    ("sglang.srt.mem_cache.hicache_storage", "PoolTransferResult.restorable_prefix_pages"),
    ("sglang.srt.mem_cache.hicache_storage", "PoolHitPolicy.TRAILING_PAGES"),
    ("sglang.srt.managers.cache_controller", "HiCacheController.attach_storage_backend"),
    ("sglang.srt.managers.cache_controller", "HiCacheController._page_get_zero_copy"),
)
"""(module, attribute) without which the storage backend cannot work."""


def version_tuple(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.5.23.post1" -> (0, 5, 23)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def installed_version(package: str) -> str | None:
    """Version of an installed distribution; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def support_of(version: str) -> Support:
    """The row of SUPPORT that ``version`` falls into."""
    numbers = version_tuple(version)
    return next((row for row in SUPPORT if row.low <= numbers < row.high), SUPPORT[-1])


def missing_attributes(probes: tuple[tuple[str, str], ...] = PROBES) -> list[str]:
    """Probe SGLang for what the adapter calls; returns dotted names that are not there."""
    return [f"{module}.{path}" for module, path in probes if not _has(module, path)]


def _has(module: str, path: str) -> bool:
    try:
        value: Any = importlib.import_module(module)
    except ImportError:
        return False
    for name in path.split("."):
        if name in getattr(value, "__dataclass_fields__", {}):
            return True
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def require_sglang() -> Support:
    """Check torch and sglang once, at construction.

    Raises:
        CapabilityError: absent, too old, or an attribute is missing; says which.
    """
    for package in ("torch", "sglang"):
        if importlib.util.find_spec(package) is None:
            raise CapabilityError(f"{package} is not installed", "sglang_adapter", "pip install sglang==0.5.23")
    version = installed_version("sglang") or "0"
    row = support_of(version)
    if row.state == "refused":
        raise CapabilityError(f"sglang {version} is not supported: {row.note}", "sglang_adapter", "use sglang 0.5.23")
    missing = missing_attributes()
    if missing:
        raise CapabilityError(
            f"sglang {version} lacks {', '.join(missing)}",
            "sglang_adapter",
            "use sglang 0.5.23, or a newer release of ours",
        )
    return row
