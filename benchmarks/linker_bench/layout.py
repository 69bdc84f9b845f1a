"""Two ways to store a page for layer-wise reading: one record with a digest per layer, or one record per layer."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from harness import Measurement, Trial, WrongBytes

from linker_bench.device import PAGE_TOKENS, view
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.nvme.layered import layer_keys
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredPages
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore


class Layouts:
    """The same bytes in both forms; every trial writes new keys, looks them up and loads them by layer."""

    def __init__(self, path: str, layers: int, pages: int) -> None:
        self._path, self.layers, self.pages = Path(path), layers, pages
        self._pool = view(layers, pages, "cpu")
        self._memory = torch.randint(0, 256, (pages, self._pool.geometry.page_bytes), dtype=torch.uint8).numpy()
        self._rows = np.arange(pages, dtype=np.int64) * PAGE_TOKENS

    def _store(self, name: str, trial: Trial) -> NvmeStore:
        folder = str(self._path / f"{name}-{trial.round}")
        return NvmeStore(HiCacheExtConfig.parse({"path": folder, "capacity": "1GiB"}))

    def _content(self, layer: int) -> np.ndarray:
        geometry = self._pool.geometry
        return self._memory[:, geometry.offset(layer) : geometry.offset(layer + 1)]

    def _check(self, layer: int) -> None:
        k, v = self._pool.buffers[layer]
        found = torch.cat([t.reshape(self.pages, -1) for t in (k, v)], dim=1).numpy()
        if not (found == self._content(layer)).all():
            raise WrongBytes(f"layer {layer}")

    def layered(self, trial: Trial) -> Measurement:
        """One record a page."""
        store = self._store("layered", trial)
        form, ns = LayeredPages(store, self._pool.geometry), store.namespace(Fingerprint("layout"))
        keys = [trial.rng.bytes(32) for _ in range(self.pages)]
        t0 = time.perf_counter()
        stored = form.write(ns, keys, self._memory).outcomes
        t1 = time.perf_counter()
        assert all(o.is_stored for o in stored) and store.hit_pages(ns, keys) == self.pages
        t2 = time.perf_counter()
        read = form.open(ns, keys, time.monotonic() + 60)
        first = 0.0
        for layer in range(self.layers):
            regions = self._pool.regions(layer, self._rows)
            if not read.read_layer(layer, np.arange(self.pages), regions, time.monotonic() + 60).is_loaded:
                raise WrongBytes(f"layer {layer} did not load")
            first = first or time.perf_counter() - t2
        return self._done(store, t0, t1, t2, first)

    def records(self, trial: Trial) -> Measurement:
        """One record a page and layer; the first layer is written last, so that it stands for the page."""
        store = self._store("records", trial)
        ns = store.namespace(Fingerprint("layout"))
        keys = [trial.rng.bytes(32) for _ in range(self.pages)]
        t0 = time.perf_counter()
        for layer in reversed(range(self.layers)):
            part = np.ascontiguousarray(self._content(layer))
            stored = store.write(ns, layer_keys(keys, layer), regions_of_array(part)).outcomes
            assert all(o.is_stored for o in stored)
        t1 = time.perf_counter()
        for layer in range(self.layers):
            assert store.hit_pages(ns, layer_keys(keys, layer)) == self.pages
        t2 = time.perf_counter()
        first = 0.0
        for layer in range(self.layers):
            result = store.read(ns, layer_keys(keys, layer), self._pool.regions(layer, self._rows))
            if set(result.outcomes) != {Outcome.LOADED}:
                raise WrongBytes(f"layer {layer} did not load")
            first = first or time.perf_counter() - t2
        return self._done(store, t0, t1, t2, first)

    def _done(self, store: NvmeStore, t0: float, t1: float, t2: float, first: float) -> Measurement:
        load = time.perf_counter() - t2
        for layer in range(self.layers):
            self._check(layer)
        entries = store.stats().pages / self.pages
        store.close()
        return Measurement(
            {
                "write_ms": 1000 * (t1 - t0), "lookup_ms": 1000 * (t2 - t1), "first_layer_ms": 1000 * first,
                "load_ms": 1000 * load, "entries_per_page": entries,
            }, {}, {},
        )  # fmt: skip
