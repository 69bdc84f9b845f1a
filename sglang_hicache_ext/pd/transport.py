"""The port under the hooks: whoever moves bytes between two processes and tells when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.pd.geometry import LayerBuffer

Rows = Sequence[tuple[int, NDArray[np.int64], NDArray[np.int64]]]
"""Items to write: (buffer position, items here, items at the peer); both arrays of one length."""


class WriteState(StrEnum):
    PENDING = "pending"  # bytes may still be read here and written there
    DONE = "done"  # every byte is in place at the peer
    FAILED = "failed"  # the path is broken; nothing more is read here
    LOST = "lost"  # failed, and bytes may still arrive until this process or the peer ends; its note never will


class Write(Protocol):
    """A posted group. Owner thread only."""

    def state(self) -> WriteState:
        """Never blocks."""
        ...

    def release(self) -> None:
        """Forget the handle; only after DONE or FAILED, or when the peer is gone."""
        ...


class Transport(Protocol):
    """Writes pages into a peer's registered memory. One thread at a time uses an instance.

    Nothing here can be cancelled: a write that is PENDING stays so until it ends by itself. Measured with UCX over tcp:
    releasing the handle and forgetting the peer did not keep 64 MiB from being read and sent seconds later.

    Attributes:
        carries_notes: a write's note reaches the peer's ``poll_notes`` by itself; otherwise the endpoint sends it.
    """

    name: str
    carries_notes: bool

    def register(self, buffers: Sequence[LayerBuffer]) -> None:
        """Register the memory, once. Raises CapabilityError with the reason."""
        ...

    def metadata(self) -> bytes:
        """What a peer's ``connect`` needs; opaque."""
        ...

    def connect(self, peer: str, metadata: bytes, buffers: Sequence[LayerBuffer]) -> Write | None:
        """Learn a peer's memory (``buffers`` as the peer registered them) and begin to warm the path to it.

        Returns:
            A write that is DONE once the path is warm, or None when there is nothing to warm. Raises StoreError.
        """
        ...

    def forget(self, peer: str) -> None:
        """The peer is gone: drop what is kept for it. Idempotent."""
        ...

    def post(self, peer: str, rows: Rows, note: bytes) -> Write:
        """Write ``rows``; ``note`` reaches the peer after the bytes, once. All buffers of a post lie on one device.

        Notes of different writes may overtake each other. Raises StoreError when the peer cannot be reached.
        """
        ...

    def poll_notes(self) -> list[bytes]:
        """Notes that came with completed writes into this process's memory. Never blocks."""
        ...

    def close(self) -> None:
        """Idempotent, bounded."""
        ...
