"""A link whose bandwidth is shared equally between the transfers on it, exactly, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from simulator.loop import EventLoop


class SharedLink:
    """Processor sharing with one cap per transfer.

    All transfers run at min(``per_transfer``, ``capacity`` / transfers), so one virtual clock (bytes given to
    each transfer so far) orders their ends, and only one event is scheduled at a time.

    Args:
        capacity: bytes per second of the whole link, > 0.
        per_transfer: bytes per second one transfer can reach alone; 0 for no cap.
        on_busy: told True when the link gets its first transfer, False when the last one left.
    """

    def __init__(
        self,
        loop: EventLoop,
        capacity: float,
        per_transfer: float = 0.0,
        on_busy: Callable[[bool], None] | None = None,
    ) -> None:
        self._loop, self._capacity = loop, capacity
        self._cap = per_transfer or float("inf")
        self._on_busy = on_busy
        self._seen_at = self._virtual = 0.0
        self._active: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._version = 0
        self.moved_bytes = 0.0
        self.busy_s = 0.0

    def __len__(self) -> int:
        return len(self._active)

    @property
    def rate(self) -> float:
        """Bytes per second each transfer gets now."""
        return min(self._cap, self._capacity / max(1, len(self._active)))

    def send(self, nbytes: float, on_done: Callable[[], None]) -> None:
        self._advance()
        self._count += 1
        heapq.heappush(self._active, (self._virtual + nbytes, self._count, on_done))
        self.moved_bytes += nbytes
        if len(self._active) == 1 and self._on_busy:
            self._on_busy(True)
        self._plan()

    def set_capacity(self, capacity: float) -> None:
        if capacity != self._capacity:
            self._advance()
            self._capacity = capacity
            self._plan()

    def _advance(self) -> None:
        now = self._loop.now
        if self._active:
            self._virtual += (now - self._seen_at) * self.rate
            self.busy_s += now - self._seen_at
        self._seen_at = now

    def _plan(self) -> None:
        self._version += 1
        if self._active:
            left = max(0.0, self._active[0][0] - self._virtual)
            self._loop.at(self._loop.now + left / self.rate, self._end_first, self._version)

    def _end_first(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._virtual, _, on_done = heapq.heappop(self._active)
        if not self._active:
            self._virtual = 0.0
            if self._on_busy:
                self._on_busy(False)
        self._plan()
        on_done()
