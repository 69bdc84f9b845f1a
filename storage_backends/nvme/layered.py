"""The layered page: one page of the store whose layers can be read, and proven, one by one.

    [header, 4 KiB multiple][layer 0: K | V][layer 1: K | V]...       every run a 4 KiB multiple

To the store it is a page like any other: one index entry, one digest over everything, published when all of it is on
disk. The header adds a digest per layer, and proves itself with the namespace and key that were asked for; so a read of
one layer proves itself as a whole page does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import KEY_BYTES
from sglang_hicache_ext.page import ALIGN, Regions, align_up
from sglang_hicache_ext.storage_backends.record import MAX_PAGE_BYTES, PageDigests, page_digest

MAGIC = b"HXlayer\x01"
_HEAD = struct.Struct("<8sIIQ24x16s")
LAYER = np.dtype([("digest", "V16"), ("sums", "<i8", 2)])
"""Of one layer: xxh3-128 keyed by namespace, key and layer; and sums that a GPU can compute, zero when there are none."""
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class LayeredGeometry:
    """``runs[layer]``: bytes of each run of one page in that layer (K and V, or one latent buffer)."""

    runs: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.runs) <= MAX_LAYERS:
            raise ConfigError(f"{len(self.runs)} layers", "LayeredGeometry", f"1 to {MAX_LAYERS} are supported")
        odd = sorted({n for runs in self.runs for n in runs if n <= 0 or n % ALIGN})
        if odd:
            raise ConfigError(
                f"one page of one layer has {odd[0]} bytes in one buffer, no multiple of {ALIGN}",
                "page size",
                "use a larger --page-size, so that every page of K, and of V, of one layer fills whole 4 KiB blocks",
            )
        if self.page_bytes > MAX_PAGE_BYTES:
            raise ConfigError(
                f"a page of {self.page_bytes} bytes is too large", "page size", "use a smaller --page-size"
            )

    @property
    def layers(self) -> int:
        return len(self.runs)

    @property
    def header_bytes(self) -> int:
        return align_up(_HEAD.size + self.layers * LAYER.itemsize)

    def layer_bytes(self, layer: int) -> int:
        return sum(self.runs[layer])

    def offset(self, layer: int) -> int:
        """Where ``layer`` starts in the page; ``layers`` gives the end."""
        return self.header_bytes + sum(sum(runs) for runs in self.runs[:layer])

    @property
    def page_bytes(self) -> int:
        return self.offset(self.layers)


def layer_keys(keys: Sequence[bytes], layer: int) -> list[bytes]:
    """What a layer's digest is keyed with: the page's key, told apart by the layer in its last word."""
    words = np.frombuffer(b"".join(keys), "<u4").reshape(len(keys), KEY_BYTES // 4).copy()
    words[:, -1] ^= np.uint32(layer + 1)
    raw = words.tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def page_regions(memory: NDArray[np.uint8], geometry: LayeredGeometry, layer: int) -> Regions:
    """Regions of one layer over pages laid out as on disk: ``memory`` is [pages, page_bytes], contiguous."""
    first = memory.ctypes.data + geometry.offset(layer)
    addrs = np.uint64(first) + np.arange(len(memory), dtype=np.uint64) * np.uint64(memory.shape[1])
    return Regions(addrs[:, None], np.asarray([geometry.layer_bytes(layer)], np.int64), memory)


def fill_headers(
    namespace: bytes,
    keys: Sequence[bytes],
    memory: NDArray[np.uint8],
    geometry: LayeredGeometry,
    sums: NDArray[np.int64],
) -> None:
    """Write the headers of pages whose layers are in place.

    Args:
        memory: [pages, page_bytes] uint8.
        sums: [pages, layers, 2] what ``LAYER`` calls sums; zeros for none.
    """
    n = len(keys)
    layers = np.zeros((n, geometry.layers), LAYER)
    for layer in range(geometry.layers):
        digests = PageDigests(namespace, layer_keys(keys, layer), page_regions(memory, geometry, layer))
        layers["digest"][:, layer] = np.frombuffer(b"".join(digests.digest(i) for i in range(n)), "V16")
    layers["sums"] = sums
    for i, key in enumerate(keys):
        memory[i, : geometry.header_bytes] = np.frombuffer(_header(namespace, key, geometry, layers[i]), np.uint8)


def _header(namespace: bytes, key: bytes, geometry: LayeredGeometry, layers: NDArray[np.void]) -> bytes:
    def packed(digest: bytes) -> bytes:
        head = _HEAD.pack(MAGIC, geometry.layers, geometry.header_bytes, geometry.page_bytes, digest)
        return (head + layers.tobytes()).ljust(geometry.header_bytes, b"\0")

    return packed(page_digest(namespace, key, packed(bytes(16))))


def read_header(namespace: bytes, key: bytes, raw: bytes, geometry: LayeredGeometry) -> NDArray[np.void] | None:
    """The LAYER rows of a header; None when it is not the header of this page."""
    magic, layers, header_bytes, page_bytes, digest = _HEAD.unpack_from(raw)
    if magic != MAGIC or (layers, header_bytes, page_bytes) != (
        geometry.layers,
        geometry.header_bytes,
        geometry.page_bytes,
    ):
        return None
    if page_digest(namespace, key, raw[: _HEAD.size - 16] + bytes(16) + raw[_HEAD.size :]) != digest:
        return None
    return np.frombuffer(raw, LAYER, geometry.layers, _HEAD.size)
