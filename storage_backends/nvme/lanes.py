"""Lanes: the engines and the directories each serves, and a bounded cache of open segment files."""

from __future__ import annotations

import errno
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_hicache_ext.storage_backends.engines.base import IoEngine
from sglang_hicache_ext.storage_backends.nvme.layout import Layout

T = TypeVar("T")
MAX_HANDLES = 256


def handle_limit() -> int:
    """Open segment files kept: a quarter of the descriptors this process may have, at most MAX_HANDLES."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_HANDLES if soft == resource.RLIM_INFINITY else max(4, min(MAX_HANDLES, soft // 4))


@dataclass(slots=True)
class _Handle:
    value: int
    users: int = 0
    is_stale: bool = False


class Lane:
    """One engine and its open files. Thread-safe."""

    def __init__(self, engine: IoEngine, layout: Layout, limit: int) -> None:
        self.engine = engine
        self._layout = layout
        self._limit = limit
        self.most_files = max(1, limit // 2)
        """Files one call should ask for at once, so that two calls beside each other can both go on."""
        self._lock = threading.Lock()
        self._handles: OrderedDict[int, _Handle] = OrderedDict()

    def acquire(self, segments: Iterable[int]) -> dict[int, int]:
        """Handles of ``segments``, kept open until ``release``; -errno for a file that cannot be opened."""
        out: dict[int, int] = {}
        with self._lock:
            for segment in segments:
                found = self._handles.get(segment)
                if found is None:
                    value = self._open(segment)
                    if value < 0:
                        out[segment] = value
                        continue
                    found = self._handles[segment] = _Handle(value)
                found.users += 1
                self._handles.move_to_end(segment)
                out[segment] = found.value
        return out

    def _open(self, segment: int) -> int:
        self._trim(self._limit - 1)
        path = str(self._layout.segment_path(segment))
        try:
            return self.engine.open_file(path)
        except OSError as err:
            if err.errno not in (errno.EMFILE, errno.ENFILE):
                return -(err.errno or errno.EIO)
        self._trim(0)  # others hold the descriptors: give back every idle one and try once more
        try:
            return self.engine.open_file(path)
        except OSError as err:
            return -(err.errno or errno.EIO)

    def release(self, handles: dict[int, int]) -> None:
        with self._lock:
            for segment, value in handles.items():
                if value < 0:
                    continue
                found = self._handles.get(segment)
                if found is not None and found.value == value:
                    found.users -= 1
            self._trim(self._limit)

    def _trim(self, limit: int) -> None:
        if len(self._handles) <= limit:
            return
        for segment in [s for s, h in self._handles.items() if not h.users]:
            if len(self._handles) <= limit:
                return
            self.engine.close_file(self._handles.pop(segment).value)

    def refresh(self, segment: int) -> None:
        """Forget the open file of ``segment`` unless it is in use: the path may name another file by now."""
        with self._lock:
            found = self._handles.get(segment)
            if found is not None and not found.users:
                self.engine.close_file(self._handles.pop(segment).value)

    def close(self) -> None:
        with self._lock:
            for handle in self._handles.values():
                self.engine.close_file(handle.value)
            self._handles.clear()


class Lanes:
    """All lanes of a store; several run in parallel on threads of their own."""

    def __init__(self, layout: Layout, engines: Sequence[IoEngine]) -> None:
        """``engines``: one for all directories, or one a directory."""
        limit = max(2, handle_limit() // len(engines))
        self.all = [Lane(e, layout, limit) for e in engines]
        self._layout = layout
        self._pool = ThreadPoolExecutor(len(engines) - 1, "hicache-lane") if len(engines) > 1 else None

    def number_of(self, directory: int) -> int:
        return directory if len(self.all) > 1 else 0

    def of_segment(self, segment: int) -> Lane:
        return self.all[self.number_of(self._layout.directory_of(segment))]

    def run(self, work: Callable[[Any], T], jobs: Sequence[Any]) -> list[T]:
        """``work`` on each job, the first on this thread, the others beside it."""
        if len(jobs) <= 1 or self._pool is None:
            return [work(job) for job in jobs]
        others = [self._pool.submit(work, job) for job in jobs[1:]]
        try:
            first = work(jobs[0])
        finally:
            wait(others)  # also when this one raises: the others still use the call's memory
        return [first, *(f.result() for f in others)]

    def close(self) -> None:
        for lane in self.all:
            lane.close()
            lane.engine.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
