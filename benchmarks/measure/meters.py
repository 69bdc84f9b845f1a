"""CPU time, clocks and progress."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(slots=True)
class Meter:
    """Context manager: seconds of wall clock and of CPU (user + system, all threads of the process).

    Interrupt and softirq time is not in it, nor is the time of other processes.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    _start: tuple[float, float] = (0.0, 0.0)

    def __enter__(self) -> Meter:
        self._start = time.perf_counter(), process_cpu_s()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter() - self._start[0]
        self.cpu_s += process_cpu_s() - self._start[1]


def process_cpu_s() -> float:
    """User and system seconds of this process so far, io_uring workers included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(slots=True)
class Progress:
    """Says on standard error what is going on, once a run takes longer than two seconds.

    A terminal gets one line rewritten in place; a file or CI log gets a line every ten seconds.
    """

    total: int
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    quiet_s: float = 2.0
    _begin: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _done: int = 0
    _width: int = 0

    def step(self, text: str) -> None:
        """Another step begins."""
        self._done += 1
        now = time.monotonic()
        is_terminal = self.stream.isatty()
        if now - self._begin < self.quiet_s or now - self._last < (0.1 if is_terminal else 10.0):
            return
        self._last = now
        share = min(1.0, self._done / max(1, self.total))
        line = f"[{share:4.0%} {now - self._begin:5.0f} s] {text}"
        if is_terminal:
            self._width = max(self._width, len(line))
            self.stream.write("\r" + line.ljust(self._width))
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def end(self) -> None:
        if self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self.stream.flush()
            self._width = 0
