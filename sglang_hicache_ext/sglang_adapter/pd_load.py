"""The decode side: connections to prefill endpoints, and loads that hold their pages until nothing can be written any more."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import HiCacheExtError
from sglang_hicache_ext.pd.hooks import DecodeHooks, Load, LoadRequest
from sglang_hicache_ext.ports import Drain
from sglang_hicache_ext.sglang_adapter import pd_geometry

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 20.0
CONNECTORS = 4
SHOWN = 800
"""Characters of a refusal that go into a request's error; the log has all of it."""


class LoadSide:
    """Thread-safe."""

    def __init__(self, manager: Any, endpoint: DecodeHooks, spaces: frozenset[str]) -> None:
        self._manager, self.endpoint, self._spaces = manager, endpoint, spaces
        self._pool = ThreadPoolExecutor(CONNECTORS, thread_name_prefix="hicache-ext-pd-connect")
        self._lock = threading.Lock()
        self._connections: dict[str, Future[str]] = {}
        self._draining: dict[int, list[Drain]] = {}

    def connect(self, address: str) -> Future[str]:
        """Connect to a prefill endpoint in the background; the result is the peer's name. A link that is up is reused."""
        with self._lock:
            known = self._connections.get(address)
            if known is not None and (not known.done() or self._is_up(known)):
                return known
            made = self._pool.submit(self._connect, address)
            self._connections[address] = made
            return made

    def _connect(self, address: str) -> str:
        try:
            return self.endpoint.connect(address, CONNECT_TIMEOUT_S)
        except HiCacheExtError as error:
            logger.error("no transfer from the prefill endpoint %s: %s", address, error)
            raise

    def _is_up(self, connection: Future[str]) -> bool:
        return connection.exception() is None and self.endpoint.is_connected(connection.result())

    def start(
        self,
        peer: str,
        room: int,
        pages: NDArray[np.integer[Any]],
        deadline_s: float,
        aux_index: int | None = None,
        state_indices: Any = None,
    ) -> Load:
        """Reserve pages; the caller tells prefill."""
        extra = pd_geometry.extra_items(self._manager.kv_args, aux_index, state_indices, self._spaces)
        wanted = np.asarray(pages, dtype=np.int64)
        return self.endpoint.start_load_kv(LoadRequest(peer, room, wanted, deadline_s, extra), announce=False)

    def give_up(self, room: int, load: Load) -> None:
        """The load is not wanted any more; its pages are not free before ``is_drained``."""
        drain = load.release()
        if not drain.is_done():
            with self._lock:
                self._draining.setdefault(room, []).append(drain)

    def is_drained(self, room: int) -> bool:
        with self._lock:
            left = [d for d in self._draining.get(room, ()) if not d.is_done()]
            if left:
                self._draining[room] = left
            else:
                self._draining.pop(room, None)
        return not left

    def describe(self) -> dict[str, Any]:
        with self._lock:
            draining = len(self._draining)
        return {"draining_rooms": draining, "quarantined_pages": self.endpoint.quarantined_pages}


def why(connection: Future[str]) -> str:
    """ "" while a connection is fine or still being made, else what is wrong with it, in words."""
    if not connection.done():
        return ""
    error = connection.exception()
    if error is None:
        return ""
    text = str(error) if isinstance(error, HiCacheExtError) else f"{type(error).__name__}: {error}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
