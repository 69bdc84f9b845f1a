"""Daemon worker threads: a call that a dead device never ends must not block interpreter exit, nor starve others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], None]

MAX_GROWTH = 4
"""Worker threads may grow to this many times the asked number while calls are stuck."""


class DaemonWorkers:
    """A fixed number of daemon threads over one queue, started when first used.

    Tasks must not raise. Unlike ThreadPoolExecutor nothing is joined at interpreter exit. A thread inside a stuck
    call is made up for by another one (``make_up``), up to MAX_GROWTH times the asked number.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._name = name
        self._asked = threads
        self._stuck = 0
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._queued = 0
        self._closed = False

    @property
    def _target(self) -> int:
        return min(self._asked * MAX_GROWTH, self._asked + self._stuck)

    def submit(self, task: Task) -> bool:
        """Queue ``task``; False after close."""
        with self._lock:
            if self._closed:
                return False
            self._queued += 1
            if self._queued > self._idle and len(self._threads) < self._target:
                self._start()
            self._tasks.put(task)
        return True

    def make_up(self, stuck: int) -> None:
        """Allow ``stuck`` more threads, because that many are inside calls that passed their deadline."""
        with self._lock:
            self._stuck += stuck
            room = self._target - len(self._threads)
            for _ in range(0 if self._closed else min(room, self._queued)):
                self._start()

    def unstuck(self, back: int) -> None:
        """Take ``back`` threads out again: their calls ended after all."""
        with self._lock:
            self._stuck -= back
            for _ in range(len(self._threads) - self._target):
                self._tasks.put(None)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            task = self._tasks.get()
            with self._lock:
                self._idle -= 1
                self._queued -= task is not None
                if task is None and (self._closed or len(self._threads) > self._target):
                    self._threads.remove(threading.current_thread())
                    return
            if task is not None:
                task()

    @property
    def threads(self) -> int:
        with self._lock:
            return len(self._threads)

    def close(self, timeout_s: float) -> bool:
        """Stop taking tasks; wait at most ``timeout_s`` for the threads to end. True when all did."""
        with self._lock:
            first, self._closed = not self._closed, True
            threads = list(self._threads)
            if first:
                for _ in threads:
                    self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
