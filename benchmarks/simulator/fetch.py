"""One prefetch from submission to its last byte, and the reads in flight of all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_hicache_ext.policy import OperationView
from sglang_hicache_ext.rates import RateMeter
from simulator.loop import EventLoop
from simulator.spec import NodeSpec
from simulator.storage import Storage
from simulator.trace import Request


@dataclass(slots=True, eq=False)
class Fetch:
    """State of one prefetch. Pages count from ``start``, the first page that was not cached at submission.

    Attributes:
        requested: pages asked for.
        hit: pages that L3 has and the host has room for; None until the hit query is back.
        issued, completed: pages handed to the I/O workers, and leading pages that have arrived.
        arrived: all pages that have arrived, also those behind a gap and those that came too late.
        is_over: every page that will come has come, or there is nothing to come.
        is_stopped: the policy ended it.
        full_before_s: seconds in which no server was free, counted by the node, at the first blocked poll.
    """

    request: Request
    start: int
    requested: int
    submitted_at: float
    hit: int | None = None
    issued: int = 0
    completed: int = 0
    arrived: int = 0
    in_flight: int = 0
    held: int = 0
    held_at: float = 0.0
    is_over: bool = False
    is_stopped: bool = False
    first_blocked_at: float | None = None
    full_before_s: float = 0.0
    last_progress_at: float = 0.0
    gaps: dict[int, int] = field(default_factory=dict)

    def view(
        self, ahead: int, fetch_pages_per_s: float, recompute_pages_per_s: float, others_waiting: int, busy_s: float
    ) -> OperationView:
        """What the policy may know."""
        return OperationView(
            self.requested,
            self.hit,
            self.completed,
            kv_done=self.is_over,
            first_blocked_at=self.first_blocked_at,
            last_progress_at=self.last_progress_at,
            pages_ahead=ahead,
            batch_pages=max(1, self.issued - self.arrived),
            fetch_pages_per_s=fetch_pages_per_s,
            recompute_pages_per_s=recompute_pages_per_s,
            others_waiting=others_waiting,
            busy_s=busy_s if self.first_blocked_at is not None else 0.0,
        )

    def arrive(self, offset: int, pages: int, now: float) -> None:
        """Count one batch; progress is published in planned order."""
        self.arrived += pages
        self.in_flight -= 1
        self.gaps[offset] = pages
        if self.is_stopped:
            return
        while self.completed in self.gaps:
            self.completed += self.gaps.pop(self.completed)
            self.last_progress_at = now


class FetchQueue:
    """Gives batches of pages to ``io_workers`` workers, in turns or request by request.

    Args:
        on_batch: told after each batch has arrived.
    """

    def __init__(
        self, loop: EventLoop, spec: NodeSpec, storage: Storage, page_tokens: int, on_batch: Callable[[Fetch], None]
    ) -> None:
        self._loop, self._storage, self._on_batch = loop, storage, on_batch
        self._workers, self._is_fair = spec.io_workers, spec.is_fair
        self.batch_pages = max(1, spec.batch_tokens // page_tokens)
        self._page_bytes = float(page_tokens * spec.kv_bytes_per_token)
        self._queue: deque[Fetch] = deque()
        self._in_flight = self._pages_in_flight = 0
        self.rate = RateMeter()

    def push(self, fetch: Fetch) -> None:
        self._queue.append(fetch)
        self._issue()

    def pages_ahead(self, fetch: Fetch) -> int:
        """Pages of other requests in flight, or read before the rest of ``fetch``."""
        rest = (fetch.hit or 0) - fetch.issued
        ahead = self._pages_in_flight - fetch.issued + fetch.arrived
        for other in self._queue:
            if other is not fetch:
                left = (other.hit or 0) - other.issued
                ahead += min(left, rest) if self._is_fair else left
            elif not self._is_fair:
                break
        return ahead

    def _issue(self) -> None:
        while self._queue and self._in_flight < self._workers:
            fetch = self._queue[0]
            hit = fetch.hit or 0
            if fetch.is_stopped or fetch.issued >= hit:
                self._queue.popleft()
                continue
            self._read(fetch, min(self.batch_pages, hit - fetch.issued))
            if fetch.issued >= hit:
                self._queue.popleft()
            elif self._is_fair:
                self._queue.rotate(-1)

    def _read(self, fetch: Fetch, pages: int) -> None:
        offset = fetch.issued
        fetch.issued += pages
        fetch.in_flight += 1
        self._in_flight += 1
        self._pages_in_flight += pages
        first = fetch.start + offset
        started = self._loop.now

        def arrived() -> None:
            self._in_flight -= 1
            self._pages_in_flight -= pages
            self.rate.record(pages, started, self._loop.now)
            fetch.arrive(offset, pages, self._loop.now)
            self._on_batch(fetch)
            self._issue()

        self._storage.read(fetch.request.pages[first : first + pages], self._page_bytes, arrived)
