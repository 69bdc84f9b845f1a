"""SGLang's page hash is a C++ extension that it compiles at first use: half a minute in the first L3 query of a fresh machine.

So it is used once while the backend starts, on a thread of its own. A machine that cannot compile it (no g++, no OpenSSL
headers) is told at start and not by the first request.
Source: sglang 0.5.23 srt/mem_cache/cpp_utils/native_hash.py:20-45.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

START_WAIT_S = 60.0
"""Longest time a start waits for the compiler; the thread goes on after that."""


def hash_a_page() -> None:
    """Hash one page through the function that SGLang's storage path uses."""
    from sglang.srt.mem_cache.utils import get_hash_str

    get_hash_str([0], None, page_size=1)


class PageHashWarmUp:
    """Runs ``use`` once on a daemon thread, from construction on. Never raises.

    Attributes:
        problem: why it failed; "" while it runs and after success.
        seconds: how long it took; 0.0 while it runs.
    """

    def __init__(self, use: Callable[[], None] = hash_a_page) -> None:
        self.problem = ""
        self.seconds = 0.0
        self._use = use
        self._thread = threading.Thread(target=self._run, name="hicache-page-hash", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self._use()
        except Exception as error:
            self.problem = f"{error}{f': {error.__cause__}' if error.__cause__ else ''}"
            logger.error("SGLang's page hash does not load, so no page can be named: %s", self.problem)
        self.seconds = time.monotonic() - started

    def wait(self, timeout_s: float = START_WAIT_S) -> bool:
        """Block at most ``timeout_s`` seconds; True when the hash is ready, or will never be (``problem``)."""
        self._thread.join(timeout_s)
        is_over = not self._thread.is_alive()
        if not is_over:
            logger.warning("SGLang's page hash still compiles after %.0f s; the first L3 query will wait", timeout_s)
        return is_over
