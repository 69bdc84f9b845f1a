"""A host pool, a host tree and a rank group that notice what must never happen."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.page import Regions, regions_of_array
from sglang_hicache_ext.ports import Clock

POISON = 0xDB
_POISON_WORD = np.uint64(0xDBDBDBDBDBDBDBDB)


def stamp(page_hash: str, nbytes: int) -> NDArray[np.uint8]:
    """The bytes that the page named ``page_hash`` (64 hex digits) must hold; no two hashes share them."""
    digest = np.frombuffer(bytes.fromhex(page_hash), np.uint8)
    return np.resize(digest, nbytes)


def stamped_pages(hashes: Sequence[str], nbytes: int) -> NDArray[np.uint8]:
    """[len(hashes), nbytes] uint8 of stamps."""
    out = np.empty((len(hashes), nbytes), np.uint8)
    for i, page_hash in enumerate(hashes):
        out[i] = stamp(page_hash, nbytes)
    return out


def fake_hashes(name: str, pages: int, start: int = 0) -> list[str]:
    """Distinct hashes for pages ``start`` and on of a prompt called ``name``; equal names share prefixes."""
    return [hashlib.sha256(f"{name}/{i}".encode()).hexdigest() for i in range(start, start + pages)]


class FakeHostPool:
    """Real memory, poisoned while free. A write into a free page, a double free and a foreign free are noticed."""

    def __init__(self, pages: int, page_bytes: int = 64) -> None:
        self.memory = np.full((pages, page_bytes), POISON, np.uint8)
        self._is_free = np.ones(pages, np.bool_)
        self._first = self.memory[:, :8].view(np.uint64)[:, 0]
        self._free: deque[int] = deque(range(pages))
        self.tree: FakeRadixIndex | None = None

    @property
    def total_pages(self) -> int:
        return len(self.memory)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def alloc(self, pages: int) -> NDArray[np.int64] | None:
        if pages > len(self._free):
            return None
        taken = np.array([self._free.popleft() for _ in range(pages)], np.int64)
        if (self.memory[taken] != POISON).any():
            raise AssertionError(f"written while free: some of host pages {taken.tolist()}")
        self._is_free[taken] = False
        return taken

    def free(self, pages: NDArray[np.int64]) -> None:
        if self._is_free[pages].any() or len(set(pages.tolist())) != len(pages):
            raise AssertionError(f"host pages freed twice: {pages.tolist()}")
        self.memory[pages] = POISON
        self._is_free[pages] = True
        self._free.extend(pages.tolist())

    def reclaim(self, pages: int, unused_since: float) -> int:
        return 0 if self.tree is None else self.tree.evict(pages, unused_since)

    def regions(self, pages: NDArray[np.int64]) -> Regions:
        return regions_of_array(self.memory).take(pages)

    def check(self) -> None:
        """Raise AssertionError when somebody wrote into a free page. Looks at 8 bytes a page; ``alloc`` at all."""
        touched = self._is_free & (self._first != _POISON_WORD)
        if touched.any():
            raise AssertionError(f"written while free: host pages {np.flatnonzero(touched).tolist()}")


@dataclass(slots=True)
class _TreePage:
    page: int
    used_at: float
    parent: str = ""
    children: int = 0


class FakeRadixIndex:
    """The host tree as a map from hash to page. Refuses pages whose bytes are not the stamp of their hash."""

    def __init__(self, pool: FakeHostPool, clock: Clock) -> None:
        self._pool, self._clock = pool, clock
        self._pages: dict[str, _TreePage] = {}
        self.inserts = 0
        pool.tree = self

    def __len__(self) -> int:
        return len(self._pages)

    def insert_host(self, handle: Any, pages: NDArray[np.int64], hashes: Sequence[str]) -> int:
        self.inserts += 1
        matched = self.match(hashes)
        for page, page_hash in zip(pages.tolist(), hashes, strict=True):
            if not np.array_equal(self._pool.memory[page], stamp(page_hash, self._pool.memory.shape[1])):
                raise AssertionError(f"wrong bytes inserted in host page {page} for {page_hash[:8]}")
        for i in range(matched, len(hashes)):
            parent = hashes[i - 1] if i else ""
            self._pages[hashes[i]] = _TreePage(int(pages[i]), self._clock.now(), parent)
            if parent in self._pages:
                self._pages[parent].children += 1
        return matched

    def match(self, hashes: Sequence[str]) -> int:
        """Count the leading pages that are in the tree, and mark them used."""
        n = 0
        while n < len(hashes) and hashes[n] in self._pages:
            self._pages[hashes[n]].used_at = self._clock.now()
            n += 1
        return n

    def evict(self, pages: int, unused_since: float = float("inf")) -> int:
        """Free up to ``pages`` least recently used leaves that nobody used since ``unused_since``."""
        freed = 0
        while freed < pages:
            leaves = [(p.used_at, h) for h, p in self._pages.items() if not p.children and p.used_at < unused_since]
            if not leaves:
                break
            entry = self._pages.pop(min(leaves)[1])
            if entry.parent in self._pages:
                self._pages[entry.parent].children -= 1
            self._pool.free(np.array([entry.page], np.int64))
            freed += 1
        return freed


class ThreadGroup:
    """A rank group of threads. Every collective is counted; unequal calls or a missing rank fail, never hang."""

    def __init__(self, ranks: int, timeout_s: float = 10.0) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._barrier = threading.Barrier(ranks)
        self._values: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * ranks
        self.calls = [0] * ranks

    def rank(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)

    def exchange(self, rank: int, values: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Give ``values`` of this rank, get those of all. Raises BrokenBarrierError when a rank stays away."""
        self.calls[rank] += 1
        self._values[rank] = values
        self._barrier.wait(self._timeout_s)
        everyone, calls = list(self._values), list(self.calls)
        self._barrier.wait(self._timeout_s)
        if len({len(v) for v in everyone}) != 1 or len(set(calls)) != 1:
            raise AssertionError(f"unequal collectives: lengths {[len(v) for v in everyone]}, calls {calls}")
        return everyone


@dataclass(frozen=True, slots=True)
class ThreadRank:
    """The RankSync of one thread of a ThreadGroup."""

    group: ThreadGroup
    index: int

    def min(self, value: int) -> int:
        return int(self.min_many(np.array([value], np.int64))[0])

    def max(self, value: int) -> int:
        return -self.min(-value)

    def min_many(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        everyone: NDArray[np.int64] = np.min(self.group.exchange(self.index, values), axis=0)
        return everyone
