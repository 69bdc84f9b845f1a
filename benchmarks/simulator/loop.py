"""The discrete-event loop: callbacks in order of simulated time, ties in order of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventLoop:
    """Simulated seconds start at 0. Deterministic: the same calls give the same run."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` at ``when``; a time in the past means now."""
        self._count += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._count, call, args))

    def run(self) -> None:
        """Run until nothing is scheduled."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, call, args = pop(heap)
            call(*args)
