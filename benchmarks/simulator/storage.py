"""L3 as a node sees it: which pages it holds, and how long a batch of them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_hicache_ext.testing.latency import LatencyModel
from simulator.cache import LruPages
from simulator.link import SharedLink
from simulator.loop import EventLoop


class Storage(Protocol):
    """Pages are page ids of the load."""

    def prefix(self, pages: Sequence[int], start: int) -> int:
        """Count the pages held in a row from ``start``."""
        ...

    def add(self, pages: Sequence[int]) -> None:
        """Publish pages that were written."""
        ...

    def read(self, pages: Sequence[int], page_bytes: float, on_done: Callable[[], None]) -> None:
        """Call ``on_done`` once all pages have arrived in host memory."""
        ...


class LocalStorage:
    """One store: a latency before the first byte, then a share of the bandwidth.

    Args:
        is_changing: asked before the next change of bandwidth is scheduled; the loop ends when it says no.
    """

    def __init__(
        self,
        loop: EventLoop,
        model: LatencyModel,
        read_Bps: float,
        stream_Bps: float = 0.0,
        capacity_pages: int | None = None,
        stored: Sequence[int] = (),
        is_changing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop, self._model, self._read_Bps, self._is_changing = loop, model, read_Bps, is_changing
        self._pages = LruPages(capacity_pages, stored)
        self.link = SharedLink(loop, read_Bps * model.share(0.0), stream_Bps)
        self._plan_change()

    def prefix(self, pages: Sequence[int], start: int) -> int:
        return self._pages.prefix(pages, start)

    def holds(self, page: int) -> bool:
        return page in self._pages

    @property
    def stored_pages(self) -> int:
        return len(self._pages)

    def add(self, pages: Sequence[int]) -> None:
        self._pages.add(pages)

    def read(self, pages: Sequence[int], page_bytes: float, on_done: Callable[[], None]) -> None:
        self._pages.touch(pages)
        delay = self._model.delay_s(pages[0], self._loop.now)
        self._loop.at(self._loop.now + delay, self.link.send, len(pages) * page_bytes, on_done)

    def _plan_change(self) -> None:
        change = self._model.next_change_s(self._loop.now)
        if change is not None:
            self._loop.at(change, self._change)

    def _change(self) -> None:
        self.link.set_capacity(self._read_Bps * self._model.share(self._loop.now))
        if self._is_changing():
            self._plan_change()
