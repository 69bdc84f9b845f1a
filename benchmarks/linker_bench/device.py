"""Device reads, byte-checked, and GB/s per path: pages of random KV from the drive into a pool on ``device``."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.sglang_adapter.linker_offload import copy_out
from sglang_hicache_ext.sglang_adapter.linker_paths import LoadPath, Slot
from sglang_hicache_ext.sglang_adapter.linker_pools import DevicePool, align_host_pool, device_pools
from sglang_hicache_ext.sglang_adapter.linker_sums import layer_sums
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredPages
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

PAGE_TOKENS, HEADS, DIM = 64, 8, 128


class MHATokenToKVPool:
    """K and V of each layer, [slots, heads, dim] bfloat16, as SGLang keeps them."""

    def __init__(self, layers: int, pages: int, device: str) -> None:
        shape = (pages * PAGE_TOKENS, HEADS, DIM)
        self.k_buffer = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        self.v_buffer = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]


def view(layers: int, pages: int, device: str) -> DevicePool:
    pool = MHATokenToKVPool(layers, pages, device)
    align_host_pool(pool)
    return device_pools(pool, PAGE_TOKENS, {"full"}).by_name["kv"]


class DeviceReads:
    """Pages written once from a source pool on the device; every load is compared with it, byte by byte."""

    def __init__(self, directory: str, device: str, *, layers: int = 32, pages: int = 128) -> None:
        self.layers, self.count = layers, pages
        config = HiCacheExtConfig.parse({"path": os.path.join(directory, "device-reads"), "capacity": "4GiB"})
        self.store = NvmeStore(config)
        self.source, self.pool = view(layers, pages, device), view(layers, pages, device)
        for buffers in self.source.buffers:
            for buffer in buffers:
                buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, device=device))
        self.layered, self.ns = (
            LayeredPages(self.store, self.pool.geometry),
            self.store.namespace(Fingerprint("device-reads")),
        )
        self.keys = [i.to_bytes(32, "big") for i in range(1, pages + 1)]
        self.rows = np.arange(pages, dtype=np.int64) * PAGE_TOKENS

    def write(self) -> float:
        """Copy out, head and store all pages; GB/s."""
        page, wave = self.pool.geometry.page_bytes, max(1, (64 << 20) // self.pool.geometry.page_bytes)
        slot = Slot(wave * page, self.pool.device)
        started = time.perf_counter()
        for at in range(0, self.count, wave):
            rows = self.rows[at : at + wave]
            memory = slot.bytes[: len(rows) * page].view(len(rows), page)
            copy_out(self.source, rows, memory)
            sums = layer_sums(self.source, rows)
            outcomes = self.layered.write(self.ns, self.keys[at : at + wave], memory.numpy(), sums).outcomes
            if not all(o.is_stored for o in outcomes):
                raise RuntimeError(f"not stored: {outcomes}")
        return self.count * page / (time.perf_counter() - started) / 1e9

    def load(self, path: LoadPath) -> dict[str, float]:
        """Load every page by layer through ``path``; raises when a byte is wrong."""
        for buffers in self.pool.buffers:
            for buffer in buffers:
                buffer.zero_()
        deadline = time.monotonic() + 60.0
        started = time.perf_counter()
        read = self.layered.open(self.ns, self.keys, deadline, path.lanes)
        first = 0.0
        for layer in range(self.layers):
            result = path.read_layer(read, self.pool, layer, self.rows, deadline)
            if not result.is_loaded:
                raise RuntimeError(f"{path.name}: layer {layer} did not load: {np.unique(result.codes).tolist()}")
            first = first or time.perf_counter() - started
        seconds = time.perf_counter() - started
        for mine, theirs in zip(self.pool.buffers, self.source.buffers, strict=True):
            if not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
                raise RuntimeError(f"{path.name}: the device holds other bytes than were stored")
        nbytes = self.count * self.pool.geometry.page_bytes
        return {"gb_s": nbytes / seconds / 1e9, "first_layer_ms": 1000 * first, "total_ms": 1000 * seconds}

    def close(self) -> None:
        self.store.close()

    def describe(self) -> dict[str, Any]:
        return {"pages": self.count, "layers": self.layers, "page_bytes": self.pool.geometry.page_bytes}
