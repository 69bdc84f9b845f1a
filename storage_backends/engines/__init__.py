"""I/O engines: io_uring, posix, kvikio and aiofiles behind one interface (base.py)."""

from __future__ import annotations

from sglang_hicache_ext.storage_backends.engines.base import PENDING, TIMED_OUT, IoEngine, IoPlan, IoResult
from sglang_hicache_ext.storage_backends.engines.probe import open_engine

__all__ = ["PENDING", "TIMED_OUT", "IoEngine", "IoPlan", "IoResult", "open_engine"]
