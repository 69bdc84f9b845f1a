"""The object store as the worker sees it. One real implementation (Mooncake); tests bring their own.

Codes are Mooncake's: for a get the bytes received, otherwise 0; negative is an error.
This module and its neighbours ``worker`` and ``mooncake`` are imported in the worker process: standard library only.
"""

from __future__ import annotations

from typing import Any, Protocol

NO_SPACE = -200
BAD_PARAMETERS = -600
NOT_READY = -703
NOT_FOUND = -704
TRANSFER_FAILED = -800
RPC_FAILED = -900

NEVER_STARTED = frozenset({NO_SPACE, BAD_PARAMETERS, NOT_READY, NOT_FOUND})
"""Refused by the master or the client's own checks before a byte moved. After any other error bytes may still move."""


class ObjectEngine(Protocol):
    """Blocking and without a deadline, as the real one is; called from several threads at once."""

    def open(self, addr: int, nbytes: int) -> dict[str, Any]:
        """Connect and register the ring [addr, addr + nbytes). Raises OSError or RuntimeError with the reason."""
        ...

    def get(self, names: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        """Read whole objects, each into sizes[i] bytes at addrs[i]."""
        ...

    def put(self, names: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        """Write objects; 0 also for a name that exists already, whose bytes then stay."""
        ...

    def pin(self, names: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        """``put`` of objects that are never evicted."""
        ...

    def get_parts(self, names: list[str], addrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Read whole objects, each scattered over several pieces of registered memory."""
        ...

    def exist(self, names: list[str]) -> list[int]:
        """1 present, 0 absent, negative: could not tell."""
        ...

    def remove(self, names: list[str]) -> list[int]: ...

    def remove_prefix(self, prefix: str) -> int:
        """Remove every object whose name starts with ``prefix``; how many, or a negative code."""
        ...

    def peers(self, names: list[str]) -> list[list[str]]:
        """The nodes that hold a copy in memory of each object; empty when unknown."""
        ...

    def register(self, addr: int, nbytes: int) -> int:
        """Register further memory, for ``get_parts``."""
        ...

    def close(self) -> None: ...
