"""Our storage backend over a store slowed by a seeded latency model; for benchmarks, never for serving.

SGLang loads it as a ``dynamic`` backend. HICACHE_BENCH_SLOW names a JSON file,
``{"model": {"kind": "heavy_tail", ...}, "bandwidth_Bps": 1e9, "config": {"prefetch_policy": "deadline"}}``; it is read again
whenever it changes, so that one engine serves several models. Model time starts at each change. ``config`` changes
keys of the backend's own config; our pipeline takes them up when the cache is flushed. Without the file the store
runs at full speed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import Namespace, PageStore, ReadResult
from sglang_hicache_ext.sglang_adapter.storage import HiCacheExtStorage
from sglang_hicache_ext.testing.latency import latency_model
from sglang_hicache_ext.testing.slow_store import SlowStore

CONTROL = "HICACHE_BENCH_SLOW"


class ControlledStore:
    """A store as slow as the control file says at this moment."""

    def __init__(self, inner: PageStore, control: Path) -> None:
        self._inner, self._control = inner, control
        self._now: dict[str, Any] = {}
        self._reader: PageStore | SlowStore = inner

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        return self._reader.read(ns, keys, regions, deadline_s)

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        self._follow_control()
        return self._inner.hit_pages(ns, keys, hold_s)

    def _follow_control(self) -> None:
        wanted = _wanted(self._control)
        if wanted != self._now:
            self._now = wanted
            slow = SlowStore(self._inner, latency_model(wanted["model"]), wanted["bandwidth_Bps"]) if wanted else None
            self._reader = slow or self._inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SlowHiCacheExtStorage(HiCacheExtStorage):
    """The backend itself; only its store is wrapped, and its config follows the control file."""

    _given: HiCacheExtConfig

    def _open(self, storage_config: Any) -> None:
        super()._open(storage_config)
        self.store: Any = ControlledStore(self.store, control_file())

    @property
    def config(self) -> HiCacheExtConfig:
        """The config as given, with what the control file changes."""
        return replace(self._given, **_wanted(control_file()).get("config", {}))

    @config.setter
    def config(self, config: HiCacheExtConfig) -> None:
        self._given = config


def control_file() -> Path:
    """Path of the control file; one that does not exist when none was named."""
    return Path(os.environ.get(CONTROL) or os.devnull)


def _wanted(control: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(control.read_text() or "{}"))
    except OSError:
        return {}
