"""The KV memory of a model and its stamps, on both sides of a transfer."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer


@dataclass(frozen=True)
class ModelShape:
    """An 8 B model: 32 layers, 8 KV heads of 128, two bytes: 128 KiB a token."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    item: int = 2
    page_tokens: int = 32

    @property
    def half_page_bytes(self) -> int:
        """K or V of one page in one layer."""
        return self.page_tokens * self.kv_heads * self.head_dim * self.item

    @property
    def layer_token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.item

    @property
    def token_bytes(self) -> int:
        return self.layers * self.layer_token_bytes


class KvMemory:
    """[layers, K|V, slots, words] int64, touched, and a first-token buffer."""

    def __init__(self, shape: ModelShape, tokens: int) -> None:
        self.shape, self.slots = shape, -(-tokens // shape.page_tokens)
        words = shape.half_page_bytes // 8
        self._map = mmap.mmap(-1, 2 * shape.layers * self.slots * shape.half_page_bytes)
        self.pages: NDArray[np.int64] = np.frombuffer(self._map, np.int64).reshape(shape.layers, 2, self.slots, words)
        self.pages[:] = -1
        self.first_token = np.zeros((4, 8), np.int64)

    def geometry(self) -> Geometry:
        s = self.shape
        rows = [
            LayerBuffer(
                f"{'kv'[half]}.{layer}", layer, self.pages[layer, half].ctypes.data, s.half_page_bytes, self.slots
            )
            for layer in range(s.layers)
            for half in (0, 1)
        ]
        last = LayerBuffer("first_token", s.layers, self.first_token.ctypes.data, 64, 4, "aux")
        return Geometry((*rows, last), {"dtype": "bfloat16", "page_tokens": str(s.page_tokens)})

    def stamps(self, layer: int, half: int, room: int, count: int) -> NDArray[np.int64]:
        """[count, 1]: the word that fills page i of a request."""
        return (room << 24 | layer << 17 | half << 16) + np.arange(count, dtype=np.int64)[:, None]

    def fill(self, slots: NDArray[np.int64], room: int) -> None:
        for layer in range(self.shape.layers):
            for half in (0, 1):
                self.pages[layer, half, slots] = self.stamps(layer, half, room, len(slots))
        self.first_token[0] = room

    def wrong_pages(self, slots: NDArray[np.int64], room: int) -> int:
        """Pieces of pages in which any word is not the stamp of ``room``."""
        wrong = int((self.first_token[0] != room).any())
        for layer in range(self.shape.layers):
            for half in (0, 1):
                same = self.pages[layer, half, slots] == self.stamps(layer, half, room, len(slots))
                wrong += int((~same.all(axis=1)).sum())
        return wrong
