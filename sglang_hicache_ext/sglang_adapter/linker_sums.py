"""Checksums that the device itself can compute: bytes that GPUDirect Storage put there never pass through the host.

Two sums over a run's 64-bit words, each word times an odd random weight, modulo 2^64: a multilinear hash. A changed
word changes a sum for certain, since an odd weight has an inverse; two changes cancel with probability 2^-63 in each
sum. The weights are fixed. As xxh3, it is no defence against someone who can write to the directory. Page and
layer are told apart by the header that holds the sums, which is proven by namespace and key.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hicache_ext.sglang_adapter.linker_pools import DevicePool

CHUNK_BYTES = 64 << 20
_SEED = 0x48695861


@lru_cache(maxsize=8)
def _weights(words: int, device: torch.device) -> torch.Tensor:
    """[2, words] int64, odd."""
    made = np.random.Generator(np.random.Philox(_SEED)).integers(-(1 << 63), (1 << 63) - 1, (2, words), np.int64)
    return torch.from_numpy(made | 1).to(device)


def run_sums(pool: DevicePool, layer: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """[pages, 2] sums of one layer of the pages at ``rows``, over its runs in order."""
    runs = pool.geometry.runs[layer]
    weights = _weights(sum(runs) // 8, pool.device)
    out = torch.zeros((len(rows), 2), dtype=torch.int64, device=pool.device)
    step = max(1, CHUNK_BYTES // sum(runs))
    offsets = torch.arange(pool.page_tokens, device=pool.device)
    for start in range(0, len(rows), step):
        first = torch.from_numpy(rows[start : start + step]).to(pool.device)
        index = (first[:, None] + offsets[None, :]).reshape(-1)
        at = 0
        for buffer, run in zip(pool.buffers[layer], runs, strict=True):
            words = buffer[index].reshape(len(first), run).view(torch.int64)
            for which in range(2):
                out[start : start + step, which] += (words * weights[which, at : at + run // 8]).sum(1)
            at += run // 8
    return out.cpu().numpy()


def layer_sums(pool: DevicePool, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """[pages, layers, 2] for the header of a layered page."""
    return np.stack([run_sums(pool, layer, rows) for layer in range(pool.geometry.layers)], axis=1)
