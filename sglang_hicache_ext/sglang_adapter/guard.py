"""The one wrapper round every call that SGLang makes: an exception becomes a miss, never a dead scheduler."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sglang_hicache_ext.errors import InvariantError, StoreClosedError
from sglang_hicache_ext.metrics import Metrics

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Guard:
    """Runs calls of the data path. Thread-safe.

    Attributes:
        disabled: why the extension switched itself off; "" while it works. Only a bug of ours does that.
    """

    def __init__(self, metrics: Metrics, log_every_s: float = 10.0) -> None:
        self.disabled = ""
        self._metrics = metrics
        self._log_every_s = log_every_s
        self._lock = threading.Lock()
        self._last_log: dict[str, float] = {}
        self._quiet: dict[str, int] = {}
        self._running: dict[int, tuple[str, float]] = {}

    def oldest_inflight(self, leave_out: str = "") -> tuple[str, float]:
        """(name, seconds) of the call that runs longest now; ("", 0.0) when none does."""
        running = [r for r in list(self._running.values()) if r[0] != leave_out]
        if not running:
            return "", 0.0
        name, started = min(running, key=lambda r: r[1])
        return name, time.monotonic() - started

    def run(self, name: str, fallback: Callable[[], T], call: Callable[[], T], *, even_off: bool = False) -> T:
        """Return ``call()``; when it raises, or the extension is off (unless ``even_off``), ``fallback()``."""
        if self.disabled and not even_off:
            return fallback()
        mine = threading.get_ident()
        outer = self._running.get(mine)
        self._running[mine] = outer or (name, time.monotonic())
        try:
            return call()
        except StoreClosedError:
            self._metrics.add("adapter_calls_after_close")
        except InvariantError as error:
            self.disabled = f"{name}: {error}"
            logger.critical("sglang-hicache-ext is off until it is attached again: %s", self.disabled, exc_info=True)
        except Exception as error:
            self._metrics.add("adapter_errors")
            self._log(name, error)
        finally:
            if outer is None:
                self._running.pop(mine, None)
        return fallback()

    def _log(self, name: str, error: Exception) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._last_log.get(name, -self._log_every_s) < self._log_every_s:
                self._quiet[name] = self._quiet.get(name, 0) + 1
                return
            self._last_log[name] = now
            quiet = self._quiet.pop(name, 0)
        logger.error("%s failed and counts as a miss (%d alike not shown): %s", name, quiet, error, exc_info=error)
