"""What lies in a store, per namespace: pages, bytes, age and heat. For tools; servers may run meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.page import ALIGN
from sglang_hicache_ext.storage_backends.nvme.heat import Heat
from sglang_hicache_ext.storage_backends.nvme.index import PAGE, Index, split_key
from sglang_hicache_ext.storage_backends.nvme.layout import GRANULE, Layout


@dataclass(frozen=True, slots=True)
class PageInfo:
    """Where one page lies. ``age_s``: at least this long ago it was written (its segment took no write since)."""

    key: bytes
    nbytes: int
    age_s: float
    was_read: bool


@dataclass(frozen=True, slots=True)
class NamespaceSurvey:
    """Sums of one namespace. ``words`` is None when the fingerprint is not known in words."""

    id: bytes
    words: dict[str, Any] | None
    pages: int
    nbytes: int
    oldest_s: float
    newest_s: float
    read_pages: int


class Survey:
    """Reads the index in slices; never a snapshot, each page at most once."""

    def __init__(self, layout: Layout, index: Index, heat: Heat) -> None:
        self._layout, self._index, self._heat = layout, index, heat

    def namespaces(self) -> list[NamespaceSurvey]:
        """Every namespace, the empty ones too."""
        ages = self._segment_ages()
        return [self._sum(ns_id, number, words, ages) for ns_id, number, words in self._index.namespaces()]

    def pages(self, number: int) -> Iterator[PageInfo]:
        """Each page of namespace ``number``."""
        ages = self._segment_ages()
        for keys, entries in self._slices(number):
            age, read = ages[entries["segment"]].tolist(), self._read(entries).tolist()
            for key, nbytes, a, r in zip(keys, entries["nbytes"].tolist(), age, read, strict=True):
                yield PageInfo(split_key(key)[1], nbytes, a, r)

    def _sum(self, ns_id: bytes, number: int, words: dict[str, Any] | None, ages: NDArray[Any]) -> NamespaceSurvey:
        pages = nbytes = read = 0
        oldest, newest = 0.0, float("inf")
        for _, entries in self._slices(number):
            age = ages[entries["segment"]]
            pages += len(entries)
            nbytes += int(entries["nbytes"].astype(np.int64).sum())
            read += int(self._read(entries).sum())
            oldest, newest = max(oldest, float(age.max())), min(newest, float(age.min()))
        return NamespaceSurvey(ns_id, words, pages, nbytes, oldest, newest if pages else 0.0, read)

    def _slices(self, number: int) -> Iterator[tuple[list[bytes], NDArray[np.void]]]:
        after = b""
        while batch := self._index.scan(number, after):
            after = batch[-1][0]
            yield [key for key, _ in batch], np.frombuffer(b"".join(v for _, v in batch), PAGE)

    def _read(self, entries: NDArray[np.void]) -> NDArray[np.bool_]:
        granule = entries["block"].astype(np.int64) * ALIGN // GRANULE
        read: NDArray[np.bool_] = self._heat.marks[entries["segment"], granule] != 0
        return read

    def _segment_ages(self) -> NDArray[np.float64]:
        """[segments] seconds since each segment file was last written."""
        ages = np.zeros(self._layout.max_segments, np.float64)
        now = time.time()
        for directory in range(len(self._layout.roots)):
            with os.scandir(self._layout.segment_dir(directory)) as entries:
                for entry in entries:
                    stem = entry.name.removesuffix(".seg")
                    if stem.isdigit() and int(stem) < len(ages):
                        ages[int(stem)] = max(0.0, now - entry.stat(follow_symlinks=False).st_mtime)
        return ages
