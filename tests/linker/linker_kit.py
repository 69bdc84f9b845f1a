"""Small device pools on the CPU, named as SGLang names them, and stores to go with them."""

import mmap
import os

import numpy as np
import torch

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.storage_backends.nvme.layered import LayeredGeometry
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredPages
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

PAGE = 64


class MHATokenToKVPool:
    def __init__(self, layers=3, heads=1, dim=32, pages=24, dtype=torch.bfloat16):
        shape = (pages * PAGE, heads, dim)
        self.k_buffer = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self.v_buffer = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self.dtype, self.head_num, self.head_dim, self.v_head_dim = dtype, heads, dim, dim


class MLATokenToKVPool:
    def __init__(self, layers=3, dim=96, pages=24):
        self.kv_buffer = [torch.zeros((pages * PAGE, 1, dim), dtype=torch.bfloat16) for _ in range(layers)]
        self.dtype, self.kv_cache_dim = torch.bfloat16, dim


class SWAKVPool:
    def __init__(self, layers=4, window_layers=2):
        self.full_kv_pool = MHATokenToKVPool(layers - window_layers)
        self.swa_kv_pool = MHATokenToKVPool(window_layers)
        self.layers_mapping = {i: (i // 2, bool(i % 2)) for i in range(layers)}


def fill(pool, seed=0):
    """Random bytes in every buffer."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(pool):
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def tensors(pool):
    if hasattr(pool, "kv_buffer"):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


def slots_of(pages):
    """Token slots of page numbers, as SGLang hands them over."""
    first = torch.tensor(pages, dtype=torch.int64) * PAGE
    return (first[:, None] + torch.arange(PAGE)[None, :]).reshape(-1)


def keys_of(count, seed=0):
    raw = np.random.default_rng(seed).bytes(32 * count)
    return [raw[32 * i : 32 * i + 32] for i in range(count)]


def open_store(path, **more):
    engine = {k: more.pop(k) for k in ("engine", "engine_factory") if k in more and not isinstance(more[k], str)}
    return NvmeStore(HiCacheExtConfig.parse({"path": str(path), "capacity": "96MiB", **more}), **engine)


def fingerprint(**more):
    return Fingerprint(model="m", layout="linker", **more)


GEOMETRY = LayeredGeometry(((8192, 4096),) * 3)


class Layered:
    """A store with pages of random bytes in ``GEOMETRY``."""

    def __init__(self, path, count=12, seed=1, **more):
        self.store = open_store(path, **more)
        self.pages, self.ns = LayeredPages(self.store, GEOMETRY), self.store.namespace(fingerprint())
        self.keys = keys_of(count, seed)
        self.memory = aligned(count, GEOMETRY.page_bytes)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape, np.uint8)

    def write(self):
        return self.pages.write(self.ns, self.keys, self.memory).outcomes

    def content(self, layer):
        return self.memory[:, GEOMETRY.offset(layer) : GEOMETRY.offset(layer + 1)]

    def place(self, pages, layer=0):
        """(array, regions) for one layer: K and V side by side."""
        array = aligned(pages, GEOMETRY.layer_bytes(layer))
        starts = np.concatenate(([0], np.cumsum(GEOMETRY.runs[layer])[:-1])).astype(np.uint64)
        base = np.uint64(array.ctypes.data) + np.arange(pages, dtype=np.uint64) * np.uint64(array.shape[1])
        return array, Regions(base[:, None] + starts[None, :], np.asarray(GEOMETRY.runs[layer], np.int64), array)


def aligned(rows, nbytes):
    return np.frombuffer(mmap.mmap(-1, rows * nbytes), np.uint8).reshape(rows, nbytes)


def segment_files(path):
    return sorted(os.path.join(path, "segments", f) for f in os.listdir(os.path.join(path, "segments")))


def flip(path, needle, at=100):
    """Change one byte inside the first place on disk that holds ``needle``; False when it is nowhere."""
    for file in segment_files(path):
        with open(file, "r+b") as f:
            raw = f.read()
            where = raw.find(needle)
            if where >= 0:
                f.seek(where + at)
                f.write(bytes([raw[where + at] ^ 0x10]))
                return True
    return False
