"""Page contents derived from the key, and a host arena in the shape of SGLang's page_first MHA pool.

Every eight bytes of a page depend on the key and on their place in the page, so a swapped page, a swapped
sector, a stale page and a flipped bit all show. The contents do not compress.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measure.samples import WrongBytes
from sglang_hicache_ext.page import Regions

_STEP_BYTES = 4 << 20


def page_keys(count: int, salt: str) -> list[bytes]:
    """``count`` distinct 32-byte keys, the same for the same salt."""
    prefix = hashlib.sha256(salt.encode()).digest()
    return [hashlib.sha256(prefix + i.to_bytes(8, "little")).digest() for i in range(count)]


class Arena:
    """``pages`` pages of host memory, pre-faulted: all K halves, then all V halves, as page_first MHA has them.

    Args:
        pages: number of pages.
        page_bytes: bytes of a page; half of it K, half V. A multiple of 8 KiB keeps O_DIRECT zero-copy.
    """

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.pages, self.page_bytes, self.half = pages, page_bytes, page_bytes // 2
        self._map = mmap.mmap(-1, max(pages * page_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, pages * page_bytes)
        self.array[:: mmap.PAGESIZE] = 0
        self.halves: NDArray[np.uint8] = self.array.reshape(2, pages, self.half)
        self.addr = int(self.array.ctypes.data)
        self._step = max(1, _STEP_BYTES // page_bytes)
        self._base = np.random.default_rng(20260101).integers(
            0, 1 << 64, (2, self.half // 8), dtype=np.uint64, endpoint=False
        )

    def regions(self, start: int = 0, stop: int | None = None) -> Regions:
        """Two regions a page, K then V."""
        stop = self.pages if stop is None else stop
        rows = np.arange(start, stop, dtype=np.uint64) * np.uint64(self.half) + np.uint64(self.addr)
        addrs = np.stack((rows, rows + np.uint64(self.pages * self.half)), axis=1)
        return Regions(addrs, np.asarray((self.half, self.half), np.int64), self)

    def stamp(self, keys: Sequence[bytes], start: int = 0) -> None:
        """Fill the pages from ``start`` on with what belongs to ``keys``."""
        words = self._words()
        for first in range(0, len(keys), self._step):
            seeds = _seeds(keys[first : first + self._step])
            here = words[:, start + first : start + first + len(seeds)]
            np.bitwise_xor(self._base[:, None, :], seeds[None, :, None], out=here)

    def blank(self) -> None:
        """Overwrite everything, so that bytes of an earlier read cannot pass for this one's."""
        self.array.fill(0xA5)

    def wrong_pages(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        """Positions in ``keys`` whose page does not hold what belongs to the key."""
        words, wrong = self._words(), []
        for first in range(0, len(keys), self._step):
            seeds = _seeds(keys[first : first + self._step])
            here = words[:, start + first : start + first + len(seeds)]
            good = ((here ^ self._base[:, None, :]) == seeds[None, :, None]).all(axis=(0, 2))
            wrong += (first + np.flatnonzero(~good)).tolist()
        return wrong

    def require(self, keys: Sequence[bytes], start: int = 0, what: str = "read") -> None:
        """Raise WrongBytes unless every page holds what belongs to its key."""
        wrong = self.wrong_pages(keys, start)
        if wrong:
            raise WrongBytes(
                f"{len(wrong)} of {len(keys)} pages hold wrong bytes after {what}, the first at {wrong[0]}"
            )

    def _words(self) -> NDArray[np.uint64]:
        words: NDArray[np.uint64] = self.halves.view(np.uint64)
        return words


def _seeds(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    raw: NDArray[Any] = np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), -1)
    seeds: NDArray[np.uint64] = np.bitwise_xor.reduce(raw, axis=1)
    return seeds
