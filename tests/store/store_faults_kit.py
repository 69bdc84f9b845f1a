"""An engine that does what a bad drive does, around a real one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.storage_backends.engines import PENDING, IoEngine, IoPlan, IoResult
from sglang_hicache_ext.storage_backends.engines.base import OnOps

Verdict = Callable[[IoPlan, NDArray[np.int64]], None]
"""Changes the results of a batch in place."""


class HeldDrain:
    """Late I/O that ends when the test says so."""

    def __init__(self) -> None:
        self.is_over = False

    def is_done(self) -> bool:
        return self.is_over

    def wait(self, timeout_s: float) -> bool:
        return self.is_over


class BadDrive:
    """Runs batches on ``inner`` and then lets ``on_read`` / ``on_write`` spoil the results.

    A spoiled operation is not announced to ``on_done``. ``drain`` goes with PENDING results.
    """

    name = "bad-drive"

    def __init__(self, inner: IoEngine) -> None:
        self.inner = inner
        self.on_read: Verdict | None = None
        self.on_write: Verdict | None = None
        self.on_open: Callable[[str], None] = lambda path: None
        self.on_sync: Callable[[int], None] = lambda handle: None
        self.drain = HeldDrain()
        self.writes: list[IoPlan] = []

    def open_file(self, path: str, *, writable: bool = True) -> int:
        self.on_open(path)
        return self.inner.open_file(path, writable=writable)

    def close_file(self, handle: int) -> None:
        self.inner.close_file(handle)

    def register_memory(self, addr: int, nbytes: int) -> bool:
        return self.inner.register_memory(addr, nbytes)

    def unregister_memory(self, addr: int) -> None:
        self.inner.unregister_memory(addr)

    def read(self, plan: IoPlan, deadline_s: float, on_done: OnOps | None = None) -> IoResult:
        if self.on_read is None:
            return self.inner.read(plan, deadline_s, on_done)
        return self._spoiled(self.inner.read(plan, deadline_s), plan, self.on_read, on_done)

    def write(self, plan: IoPlan, deadline_s: float, on_submitted: OnOps | None = None) -> IoResult:
        self.writes.append(plan)
        result = self.inner.write(plan, deadline_s, on_submitted)
        return result if self.on_write is None else self._spoiled(result, plan, self.on_write, None)

    def _spoiled(self, result: IoResult, plan: IoPlan, verdict: Verdict, on_done: OnOps | None) -> IoResult:
        res = result.res.copy()
        verdict(plan, res)
        if on_done is not None:
            on_done(np.flatnonzero(res == plan.op_bytes))
        return IoResult(res, self.drain if (res == PENDING).any() else None)

    def sync(self, handle: int) -> None:
        self.on_sync(handle)
        self.inner.sync(handle)

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name}

    def close(self) -> None:
        self.inner.close()


def fail(code: int, *operations: int) -> Verdict:
    """The given operations (all without any) end with -code."""

    def verdict(plan: IoPlan, res: NDArray[np.int64]) -> None:
        res[list(operations) if operations else slice(None)] = -code

    return verdict


def shorten(plan: IoPlan, res: NDArray[np.int64]) -> None:
    """Every operation ends 4 KiB early."""
    res -= 4096


def never_end(plan: IoPlan, res: NDArray[np.int64]) -> None:
    res[:] = PENDING


EIO, ENOSPC, EACCES = errno.EIO, errno.ENOSPC, errno.EACCES
