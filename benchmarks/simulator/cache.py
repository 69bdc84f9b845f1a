"""Least-recently-used page sets: the GPU's L1, the host's L2 and a bounded L3."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class LruPages:
    """A set of page ids with a capacity. One touch of a prefix makes its head newest, so children leave first.

    Args:
        capacity_pages: None for no limit.
    """

    def __init__(self, capacity_pages: int | None = None, pages: Iterable[int] = ()) -> None:
        self._capacity = capacity_pages
        self._order: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0
        self.evicted = 0
        self.add(list(pages))

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, page: int) -> bool:
        return page in self._order

    @property
    def capacity_pages(self) -> int | None:
        return self._capacity

    def prefix(self, pages: Sequence[int], start: int = 0) -> int:
        """Count the pages present in a row from ``start``."""
        order, i = self._order, start
        for i in range(start, len(pages)):
            if pages[i] not in order:
                return i - start
        return len(pages) - start

    def touch(self, pages: Sequence[int]) -> None:
        """Mark pages used; absent ones are skipped."""
        order = self._order
        for page in reversed(pages):
            if page in order:
                order.move_to_end(page)

    def add(self, pages: Sequence[int]) -> None:
        """Insert or touch ``pages``, then evict the oldest down to the capacity.

        A prefix longer than the capacity keeps its head: a tail without its head is of no use.
        """
        if self._capacity is not None:
            pages = pages[: max(0, self._capacity - self._reserved)]
        order = self._order
        for page in reversed(pages):
            if page in order:
                order.move_to_end(page)
            else:
                order[page] = None
        self._trim()

    def reserve(self, pages: int) -> int:
        """Take up to ``pages`` of the capacity away for I/O in flight, evicting the oldest. Returns how many."""
        if self._capacity is not None:
            pages = min(pages, self._capacity - self._reserved)
        self._reserved += pages
        self._trim()
        return pages

    def release(self, pages: int) -> None:
        self._reserved -= pages

    def _trim(self) -> None:
        if self._capacity is None:
            return
        order, limit = self._order, self._capacity - self._reserved
        while len(order) > limit:
            order.popitem(last=False)
            self.evicted += 1
