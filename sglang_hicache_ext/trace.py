"""Spans of the pipeline in Chrome's trace format (chrome://tracing, Perfetto). Bounded, thread-safe."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import Any


class Trace:
    """Collects spans; the oldest are dropped beyond ``most``. Times are Clock seconds."""

    def __init__(self, most: int = 200_000) -> None:
        self._spans: deque[dict[str, Any]] = deque(maxlen=most)

    def span(self, stage: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record one piece of work of ``stage`` (query, io, insert, backup) on the calling thread."""
        self._spans.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": threading.current_thread().name,
                "cat": stage,
                "name": f"{stage} {name}",
                "ts": start_s * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "args": args,
            }
        )

    @property
    def spans(self) -> list[dict[str, Any]]:
        return list(self._spans)

    def write(self, path: str) -> None:
        """Write a JSON object that trace viewers open."""
        threads = sorted({s["tid"] for s in self._spans})
        names = [
            {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": t}} for i, t in enumerate(threads)
        ]
        spans = [{**s, "tid": threads.index(s["tid"])} for s in self._spans]
        with open(path, "w") as f:
            json.dump({"traceEvents": names + spans, "displayTimeUnit": "ms"}, f)
