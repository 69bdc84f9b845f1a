"""The port under the hooks: whoever moves bytes between two processes and tells when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.pd.geometry import LayerBuffer


class WriteState(StrEnum):
    PENDING = "pending"  # bytes may still move, in this process or the peer's memory
    DONE = "done"  # every byte is in place at the peer
    FAILED = "failed"  # it will not complete; bytes may move until the peer is disconnected


class Write(Protocol):
    """A posted group. Owner thread only."""

    def state(self) -> WriteState:
        """Never blocks."""
        ...

    def release(self) -> None:
        """Forget the handle; only once it is DONE, or FAILED and the peer is disconnected."""
        ...


class Transport(Protocol):
    """Writes pages into a peer's registered memory. One thread owns an instance after ``register``; no call raises
    for a peer's death except ``post``, which raises StoreError."""

    name: str

    def register(self, buffers: Sequence[LayerBuffer]) -> None:
        """Register the memory, once. Raises CapabilityError with the reason."""
        ...

    def metadata(self) -> bytes:
        """What a peer's ``connect`` needs; opaque."""
        ...

    def connect(self, peer: str, metadata: bytes, buffers: Sequence[LayerBuffer]) -> None:
        """Learn a peer's memory (addresses in ``buffers`` are the peer's) and warm the path to it. Raises StoreError."""
        ...

    def disconnect(self, peer: str) -> None:
        """After return no write to ``peer`` moves a byte in this process's memory any more. Idempotent."""
        ...

    def post(self, peer: str, rows: Sequence[tuple[int, NDArray[np.int64], NDArray[np.int64]]], note: bytes) -> Write:
        """Write items (buffer position, local items, remote items); ``note`` reaches the peer after the bytes, once.

        Notes of different writes may overtake each other. Raises StoreError when the peer is gone.
        """
        ...

    def poll_notes(self) -> list[bytes]:
        """Notes that came with completed writes into this process's memory. Never blocks."""
        ...

    def close(self) -> None:
        """Idempotent, bounded."""
        ...
