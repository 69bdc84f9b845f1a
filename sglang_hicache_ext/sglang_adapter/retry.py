"""Holes heal: pages that the store refused or failed to write are kept for a while and written again.

SGLang never offers a page a second time while its node stays cached, and one missing page hides all behind it. By the
time of a retry the host page may hold something else, so the bytes are copied. Bounded: pages, bytes, attempts.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import StoreClosedError
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.page import Regions, regions_of_array
from sglang_hicache_ext.ports import Namespace, PageStore

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Bytes of page copies kept at most."""

MAX_ATTEMPTS = 8
FIRST_DELAY_S = 0.25
MAX_DELAY_S = 30.0


@dataclass(slots=True)
class _Failed:
    ns: Namespace
    key: bytes
    page: NDArray[np.uint8]
    region_sizes: tuple[int, ...]
    due: float
    attempts: int = 0


class WriteRetry:
    """Thread-safe; one thread of its own, started with the first failure and joined by ``close``."""

    def __init__(self, store: PageStore, metrics: Metrics, max_pages: int, max_bytes: int = MAX_BYTES) -> None:
        self._store, self._metrics = store, metrics
        self._max_pages, self._max_bytes = max_pages, max_bytes
        self._changed = threading.Condition()
        self._failed: deque[_Failed] = deque()
        self._bytes = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def pending_pages(self) -> int:
        with self._changed:
            return len(self._failed)

    def take(self, ns: Namespace, keys: list[bytes], regions: Regions, positions: list[int]) -> list[int]:
        """Copy the pages at ``positions``; returns those that were taken. Call while the host pages are still valid."""
        taken = []
        for position in positions:
            if not self._reserve(regions.page_bytes):
                break
            page = _copy_of(regions, position)
            failed = _Failed(ns, keys[position], page, tuple(regions.sizes.tolist()), time.monotonic() + FIRST_DELAY_S)
            self._append(failed)
            taken.append(position)
        self._metrics.add("adapter_writes_kept", len(taken))
        self._metrics.add("adapter_writes_given_up", len(positions) - len(taken))
        return taken

    def _reserve(self, nbytes: int) -> bool:
        with self._changed:
            fits = len(self._failed) < self._max_pages and self._bytes + nbytes <= self._max_bytes
            if self._closing or not fits:
                return False
            self._bytes += nbytes
            return True

    def _append(self, failed: _Failed) -> None:
        with self._changed:
            self._failed.append(failed)
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="hicache-ext-retry", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (not self._failed or self._wait_s() > 0):
                    self._changed.wait(self._wait_s() if self._failed else None)
                if self._closing:
                    return
                failed = self._failed.popleft()
            self._settle(failed, self._is_written(failed))

    def _wait_s(self) -> float:
        return self._failed[0].due - time.monotonic()

    def _is_written(self, failed: _Failed) -> bool:
        failed.attempts += 1
        try:
            result = self._store.write(
                failed.ns, [failed.key], regions_of_array(failed.page.reshape(1, -1), failed.region_sizes)
            )
            return result.outcomes[0].is_stored
        except StoreClosedError:
            return False
        except Exception as error:
            logger.debug("retry of a page write failed: %s", error)
            return False

    def _settle(self, failed: _Failed, written: bool) -> None:
        again = not written and failed.attempts < MAX_ATTEMPTS
        self._metrics.add("adapter_writes_healed", int(written))
        self._metrics.add("adapter_writes_given_up", int(not written and not again))
        with self._changed:
            if again and not self._closing:
                failed.due = time.monotonic() + min(MAX_DELAY_S, FIRST_DELAY_S * 2**failed.attempts)
                self._failed.append(failed)
            else:
                self._bytes -= failed.page.nbytes

    def clear(self) -> None:
        """Forget what waits: the store was cleared."""
        with self._changed:
            self._bytes -= sum(f.page.nbytes for f in self._failed)
            self._failed.clear()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop; what still waits is lost. Idempotent, bounded."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        self.clear()


def _copy_of(regions: Regions, position: int) -> NDArray[np.uint8]:
    page = np.empty(regions.page_bytes, np.uint8)
    target = page.ctypes.data
    for addr, size in zip(regions.addrs[position].tolist(), regions.sizes.tolist(), strict=True):
        ctypes.memmove(target, addr, size)
        target += size
    return page
