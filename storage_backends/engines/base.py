"""What an I/O engine is: it moves bytes between file extents and host memory, in batches, bounded in time.

Engines know nothing of pages, keys or checksums. The store plans, the engine moves.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.ports import Drain

OnOps = Callable[[NDArray[np.int64]], None]
"""Called on the calling thread with the positions of operations; overlaps the device's work."""

PENDING = -(1 << 62)
"""Result of an operation that was still in flight at the deadline."""

TIMED_OUT = -errno.ETIMEDOUT
"""Result of an operation that the deadline stopped before it began or after it was cancelled: no byte of it moves."""


@dataclass(frozen=True)
class IoPlan:
    """A batch of operations, each one contiguous file extent against one or more memory pieces.

    Attributes:
        files: [ops] int32 handles from ``IoEngine.open_file``.
        offsets: [ops] int64 byte offsets in the file.
        iov_start: [ops + 1] int32; operation i owns iov[iov_start[i]:iov_start[i+1]].
        iov: [pieces, 2] uint64 rows of (address, bytes).
        owner: anything that must stay referenced until every operation is done.
    """

    files: NDArray[np.int32]
    offsets: NDArray[np.int64]
    iov_start: NDArray[np.int32]
    iov: NDArray[np.uint64]
    owner: Any = None

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def has_single_pieces(self) -> bool:
        """Operation i is memory piece i."""
        return len(self.iov) == len(self) and bool((np.diff(self.iov_start) == 1).all())

    @cached_property
    def op_bytes(self) -> NDArray[np.int64]:
        """[ops] int64: bytes of each operation."""
        if self.has_single_pieces:
            return self.iov[:, 1].astype(np.int64)
        sums = np.concatenate(([0], np.cumsum(self.iov[:, 1].astype(np.int64))))
        return sums[self.iov_start[1:]] - sums[self.iov_start[:-1]]


@dataclass(frozen=True, slots=True)
class IoResult:
    """[ops] int64: bytes moved, -errno, or PENDING. ``drain`` is set when any operation is PENDING.

    A result below ``op_bytes`` means end of file: engines resubmit short transfers themselves.
    """

    res: NDArray[np.int64]
    drain: Drain | None = None


class IoEngine(Protocol):
    """Thread-safe: several threads run batches at once.

    ``run`` returns when all operations are done or the deadline passed. Operations still in flight
    then stay tracked by ``drain``; the engine keeps plan.owner referenced until they end.
    EINTR, EAGAIN and short transfers are the engine's own business; other errors are per operation.
    """

    name: str

    def open_file(self, path: str, *, writable: bool = True) -> int:
        """Open an existing file and return a handle; O_DIRECT where the engine uses it. Raises OSError."""
        ...

    def close_file(self, handle: int) -> None: ...

    def register_memory(self, addr: int, nbytes: int) -> bool:
        """Pin or register host memory for faster I/O. Optional: False when not possible (and why in describe())."""
        ...

    def unregister_memory(self, addr: int) -> None: ...

    def read(self, plan: IoPlan, deadline_s: float, on_done: OnOps | None = None) -> IoResult:
        """Read. ``on_done`` gets positions of operations as they complete in full."""
        ...

    def write(self, plan: IoPlan, deadline_s: float, on_submitted: OnOps | None = None) -> IoResult:
        """Write. ``on_submitted`` gets positions of operations just handed to the device."""
        ...

    def sync(self, handle: int) -> None:
        """fdatasync. Raises OSError."""
        ...

    def describe(self) -> dict[str, Any]:
        """Requested and effective path: direct I/O, registered memory, depth, kernel features, and why not."""
        ...

    def close(self) -> None:
        """Idempotent; bounded even when operations hang."""
        ...
