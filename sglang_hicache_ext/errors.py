"""The error family. A miss is a value, never an exception; these are for what the caller did not ask for."""

from __future__ import annotations

from dataclasses import dataclass


class HiCacheExtError(Exception):
    """Base of every exception this package raises."""


class _WhatWhereTodo(HiCacheExtError):
    def __init__(self, what: str, where: str = "", todo: str = "") -> None:
        self.what, self.where, self.todo = what, where, todo
        parts = [what]
        if where:
            parts.append(f"(in {where})")
        if todo:
            parts.append(f"-> {todo}")
        super().__init__(" ".join(parts))


class ConfigError(_WhatWhereTodo):
    """Bad input at construction: what is wrong, where it stands, what to write instead."""


class CapabilityError(_WhatWhereTodo):
    """A feature that was asked for (O_DIRECT, io_uring, GDS, RDMA, a layout) is not there. Construction only."""


@dataclass(eq=False)
class StoreError(HiCacheExtError):
    """A whole store call failed. Never proof of corruption: no page is removed because of it.

    Attributes:
        operation: "read", "write", "lookup", "open", ...
        detail: one sentence for a person.
        key: hex page key, or "" when the failure is not about one page.
        path: file or endpoint.
        errno: operating-system error number, 0 when there is none.
        is_transient: True when the same call may succeed later (EAGAIN, ETIMEDOUT, ENOSPC after reclaim).
    """

    operation: str
    detail: str
    key: str = ""
    path: str = ""
    errno: int = 0
    is_transient: bool = False

    def __str__(self) -> str:
        where = " ".join(
            p for p in (f"key={self.key}" if self.key else "", f"path={self.path}" if self.path else "") if p
        )
        kind = "transient" if self.is_transient else "permanent"
        return f"{self.operation}: {self.detail} [errno={self.errno} {kind}{' ' + where if where else ''}]"


class StoreClosedError(HiCacheExtError):
    """The store was closed by its owner; the call came too late."""


class InvariantError(HiCacheExtError):
    """A bug of ours (double free, illegal transition). The adapter disables the extension; serving goes on."""
