"""Our storage backend over a store slowed by a seeded latency model; for benchmarks, never for serving.

SGLang loads it as a ``dynamic`` backend. HICACHE_BENCH_SLOW names a JSON file,
``{"model": {"kind": "heavy_tail", ...}, "bandwidth_Bps": 1e9}``; it is read again whenever it changes, so that one engine
serves several models. Model time starts at each change. Without the file the store runs at full speed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        self._text = ""
        self._reader: PageStore | SlowStore = inner

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        return self._reader.read(ns, keys, regions, deadline_s)

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        self._follow_control()
        return self._inner.hit_pages(ns, keys, hold_s)

    def _follow_control(self) -> None:
        try:
            text = self._control.read_text()
        except OSError:
            return
        if text != self._text:
            self._text, wanted = text, json.loads(text)
            self._reader = SlowStore(self._inner, latency_model(wanted["model"]), wanted["bandwidth_Bps"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SlowHiCacheExtStorage(HiCacheExtStorage):
    """The backend itself; only its store is wrapped."""

    def _open(self, storage_config: Any) -> None:
        super()._open(storage_config)
        control = os.environ.get(CONTROL)
        if control:
            self.store = ControlledStore(self.store, Path(control))
