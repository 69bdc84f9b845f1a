"""SGLang's device pools as the linker sees them: for each layer the buffers, for each page its rows.

SGLang's own assembler refuses plain MHA, GQA, MLA and SWA pools, so this is a view of our own. What it does not know
it refuses by name: a pool with more state than K and V (scales, an indexer, Mamba state) would come back incomplete.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.page import ALIGN, Regions
from sglang_hicache_ext.storage_backends.nvme.layered import LayeredGeometry

WHERE = "--unified-cache-external-linker-config"
KV, SWA = "kv", "swa"
_HINT = "start without the linker; the `nvme` storage backend serves this model through the host tier"


@dataclass(frozen=True)
class DevicePool:
    """One pool of this rank.

    Attributes:
        name: SGLang's pool name.
        pool: SGLang's pool object.
        buffers: [layers] tuples of [rows, row bytes] uint8 views: (K, V), or one latent buffer.
        page_tokens: rows of a page; a page is that many consecutive rows.
        geometry: of a page on disk.
        is_replicated: every TP rank holds the same bytes (MLA).
    """

    name: str
    pool: Any
    buffers: tuple[tuple[torch.Tensor, ...], ...]
    page_tokens: int
    geometry: LayeredGeometry
    is_replicated: bool

    @property
    def device(self) -> torch.device:
        return self.buffers[0][0].device

    @property
    def has_sums(self) -> bool:
        """Headers carry sums that the device computes, so that bytes which GDS put there can be proven there."""
        return self.device.type == "cuda"

    def rows(self, slots: torch.Tensor, pages: int) -> NDArray[np.int64]:
        """First row of each page. Raises ValueError when the slots are not whole pages inside the pool."""
        flat = slots.detach().to("cpu", torch.int64).numpy().reshape(-1)
        if len(flat) != pages * self.page_tokens:
            raise ValueError(f"pool {self.name}: {len(flat)} slots for {pages} pages of {self.page_tokens}")
        table = flat.reshape(pages, self.page_tokens)
        first = table[:, 0].copy()
        if (table != first[:, None] + np.arange(self.page_tokens)).any():
            raise ValueError(f"pool {self.name}: the slots of a page are not consecutive")
        most = min(b.shape[0] for buffers in self.buffers for b in buffers)
        if pages and (first.min() < 0 or first.max() + self.page_tokens > most):
            raise ValueError(f"pool {self.name}: slots outside the pool")
        return first

    def regions(self, layer: int, rows: NDArray[np.int64]) -> Regions:
        """Where one layer of the pages at ``rows`` lies: addresses in the device's memory."""
        columns = [
            np.uint64(b.data_ptr()) + rows.astype(np.uint64) * np.uint64(b.shape[1]) for b in self.buffers[layer]
        ]
        sizes = np.asarray(self.geometry.runs[layer], np.int64)
        return Regions(np.stack(columns, axis=1), sizes, self.buffers[layer])

    @property
    def is_aligned(self) -> bool:
        return all(b.data_ptr() % ALIGN == 0 for buffers in self.buffers for b in buffers)


@dataclass(frozen=True)
class DevicePools:
    """``steps[layer]``: which (pool, layer of that pool) the forward waits for at a layer of the model."""

    by_name: dict[str, DevicePool]
    steps: tuple[tuple[str, int], ...]


def device_pools(kvcache: Any, page_tokens: int, components: set[str]) -> DevicePools:
    """View of SGLang's KV cache object.

    Raises:
        CapabilityError: a pool or component that the linker does not know, by name.
        ConfigError: pages that do not fill whole 4 KiB blocks; says so and what to change.
    """
    unknown = sorted(components - {"full", "swa"})
    if unknown:
        raise CapabilityError(f"the linker does not support {', '.join(unknown)} state", WHERE, _HINT)
    kind = type(kvcache).__name__
    if kind == "SWAKVPool":
        parts = {KV: kvcache.full_kv_pool, SWA: kvcache.swa_kv_pool}
        pools = {name: _pool(name, part, page_tokens) for name, part in parts.items()}
        mapping = kvcache.layers_mapping
        steps = tuple((SWA if mapping[i][1] else KV, int(mapping[i][0])) for i in sorted(mapping))
        return DevicePools(pools, steps)
    if "swa" in components:
        raise CapabilityError(f"pool {kind} with sliding-window state is not supported by the linker", WHERE, _HINT)
    pool = _pool(KV, kvcache, page_tokens)
    return DevicePools({KV: pool}, tuple((KV, layer) for layer in range(len(pool.buffers))))


def _pool(name: str, pool: Any, page_tokens: int) -> DevicePool:
    kind = type(pool).__name__
    if kind == "MHATokenToKVPool":
        tensors: list[tuple[torch.Tensor, ...]] = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    elif kind == "MLATokenToKVPool":
        tensors = [(t,) for t in pool.kv_buffer]
    else:
        raise CapabilityError(f"device pool {kind} is not supported by the linker", WHERE, _HINT)
    buffers = tuple(tuple(_byte_rows(t, name) for t in layer) for layer in tensors)
    runs = tuple(tuple(page_tokens * b.shape[1] for b in layer) for layer in buffers)
    return DevicePool(name, pool, buffers, page_tokens, LayeredGeometry(runs), kind == "MLATokenToKVPool")


def _byte_rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """[rows, row bytes] view; the rows must follow one another without gaps."""
    row = tensor[0].numel() * tensor.element_size()
    if not tensor[0].is_contiguous() or tensor.stride(0) * tensor.element_size() != row:
        raise CapabilityError(
            f"pool {name}: rows of {tuple(tensor.shape)}, strides {tensor.stride()} are not adjacent", WHERE, _HINT
        )
    return tensor.flatten(1).view(torch.uint8)


def align_host_pool(pool: Any) -> None:
    """Move the buffers of a pool in host memory to page-aligned memory, so that direct I/O reaches them.

    The tensors stay the same objects; only used at start, before anything was computed.
    """
    parts = [pool.full_kv_pool, pool.swa_kv_pool] if hasattr(pool, "full_kv_pool") else [pool]
    for part in parts:
        names = [n for n in ("k_buffer", "v_buffer", "kv_buffer") if hasattr(part, n)]
        for tensor in (t for name in names for t in getattr(part, name)):
            _align(tensor)
        if hasattr(part, "_init_data_ptrs_and_strides"):
            part._init_data_ptrs_and_strides()


def _align(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.data_ptr() % ALIGN == 0 or not tensor.is_contiguous():
        return
    memory = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=torch.uint8)
    fresh = memory.view(tensor.dtype).view(tensor.shape)
    fresh.copy_(tensor)
    tensor.set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())


def concatenated(slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """The slots of several requests in one tensor."""
    return slots[0] if len(slots) == 1 else torch.cat(list(slots))
