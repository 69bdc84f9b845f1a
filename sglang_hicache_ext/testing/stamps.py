"""Stamped pages: host memory in every SGLang layout, filled so that a page proves whose it is."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.page import Regions, align_up


def page_key(number: int, salt: str = "") -> bytes:
    """A 32-byte key that looks like SGLang's hashes; equal arguments give equal keys."""
    return hashlib.sha256(f"{salt}/{number}".encode()).digest()


def page_keys(count: int, start: int = 0, salt: str = "") -> list[bytes]:
    return [page_key(n, salt) for n in range(start, start + count)]


def stamp(namespace: bytes, key: bytes, nbytes: int) -> NDArray[np.uint8]:
    """The payload of a page: every 8 bytes depend on the namespace, the key and their place."""
    seed = np.frombuffer(hashlib.blake2b(namespace + key, digest_size=8).digest(), np.uint64)[0]
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    payload: NDArray[np.uint8] = (words ^ seed).view(np.uint8)
    return payload[:nbytes]


class HostArena:
    """Page-aligned host memory of ``pages`` pages, cut into regions as SGLang cuts its host pool.

    Attributes:
        regions: [pages, regions] addresses. Region r of all pages lies together, as in ``page_first`` and
            ``layer_first`` pools; with ``shift`` bytes every region starts unaligned.
    """

    def __init__(self, pages: int, region_sizes: Sequence[int], shift: int = 0) -> None:
        self.page_bytes = sum(region_sizes)
        self._sizes = list(region_sizes)
        plane_bytes = [align_up(pages * size + shift) for size in region_sizes]
        self.memory = mmap.mmap(-1, max(4096, sum(plane_bytes)))
        self._bytes = np.frombuffer(self.memory, np.uint8)
        starts = np.cumsum([0, *plane_bytes[:-1]]) + shift
        rows = np.arange(pages, dtype=np.int64)[:, None] * np.asarray(region_sizes, np.int64)[None, :]
        self._offsets = starts[None, :] + rows
        base = np.uint64(self._bytes.ctypes.data)
        addrs = self._offsets.astype(np.uint64) + base
        self.regions = Regions(addrs, np.asarray(region_sizes, np.int64), self.memory)

    def page(self, row: int) -> NDArray[np.uint8]:
        """A copy of one page's payload, regions in order."""
        pairs = zip(self._offsets[row].tolist(), self._sizes, strict=True)
        return np.concatenate([self._bytes[at : at + size] for at, size in pairs])

    def put(self, row: int, payload: NDArray[np.uint8]) -> None:
        done = 0
        for at, size in zip(self._offsets[row].tolist(), self._sizes, strict=True):
            self._bytes[at : at + size] = payload[done : done + size]
            done += size

    def fill(self, namespace: bytes, keys: Sequence[bytes]) -> Regions:
        """Stamp the first ``len(keys)`` pages; returns their regions."""
        for row, key in enumerate(keys):
            self.put(row, stamp(namespace, key, self.page_bytes))
        return self.regions.slice(0, len(keys))

    def poison(self) -> None:
        self._bytes[:] = 0xA5

    def holds(self, row: int, namespace: bytes, key: bytes) -> bool:
        """Whether a page carries the stamp of (namespace, key), every byte of it."""
        return bool(np.array_equal(self.page(row), stamp(namespace, key, self.page_bytes)))
