"""Who runs the workers' bodies: threads in production, a seeded stepper in tests (testing/sim.py).

A body is a generator that yields True after a piece of work and False when there is none. It calls whatever may
block through ``Executor.call``, so that a stepper can put time, and other steps, between begin and end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Body = Callable[[], Iterator[bool]]


class Executor(Protocol):
    def add(self, name: str, body: Body) -> None:
        """Run ``body`` from now on."""
        ...

    def wake(self) -> None:
        """There may be work. Never blocks."""
        ...

    def call(self, fn: Callable[..., T], *args: Any) -> Generator[bool, None, T]:
        """Run ``fn`` inside a body: ``result = yield from executor.call(fn, ...)``."""
        ...

    def stop(self, timeout_s: float) -> list[str]:
        """End all bodies; returns the names of those still inside a call after ``timeout_s``."""
        ...


class ThreadExecutor:
    """One daemon thread for each body; a thread stuck in a call never keeps the process alive."""

    def __init__(self, idle_s: float = 0.2) -> None:
        self._idle_s = idle_s
        self._stopping = threading.Event()
        self._workers: list[tuple[threading.Thread, threading.Event]] = []

    def add(self, name: str, body: Body) -> None:
        bell = threading.Event()
        thread = threading.Thread(target=self._run, args=(body, bell), name=name, daemon=True)
        self._workers.append((thread, bell))
        thread.start()

    def _run(self, body: Body, bell: threading.Event) -> None:
        for did_work in body():
            if self._stopping.is_set():
                return
            if not did_work:
                bell.wait(self._idle_s)
                bell.clear()

    def wake(self) -> None:
        for _, bell in self._workers:
            bell.set()

    def call(self, fn: Callable[..., T], *args: Any) -> Generator[bool, None, T]:
        yield from ()
        return fn(*args)

    def stop(self, timeout_s: float) -> list[str]:
        self._stopping.set()
        self.wake()
        end = time.monotonic() + timeout_s
        for thread, _ in self._workers:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread.name for thread, _ in self._workers if thread.is_alive()]
