"""A link of a given speed on top of a real driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sglang_hicache_ext.pd.geometry import LayerBuffer
from sglang_hicache_ext.pd.transport import Rows, Transport, Write, WriteState


class _LinkWrite:
    """DONE when the driver's write is, and not before the emulated link would have carried it."""

    def __init__(self, inner: Write, ends_at: float, clock: Callable[[], float]) -> None:
        self._inner, self._ends_at, self._clock = inner, ends_at, clock

    def state(self) -> WriteState:
        state = self._inner.state()
        return WriteState.PENDING if state is WriteState.DONE and self._clock() < self._ends_at else state

    def release(self) -> None:
        self._inner.release()


class ThrottledTransport:
    """One queue of ``bytes_per_s`` for all peers: a write ends when those before it have, plus its own time.

    The bytes move through ``inner`` for real, at once. What is delayed is the completion, and with it the note, which
    therefore goes over the control link: the receiver learns of a group when the link would have delivered it.
    """

    carries_notes = False

    def __init__(self, inner: Transport, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner, self.bytes_per_s, self._clock = inner, bytes_per_s, clock
        self.name = inner.name
        self._free_at = 0.0
        self._item_bytes: tuple[int, ...] = ()

    def register(self, buffers: Sequence[LayerBuffer]) -> None:
        self._item_bytes = tuple(b.item_bytes for b in buffers)
        self.inner.register(buffers)

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def connect(self, peer: str, metadata: bytes, buffers: Sequence[LayerBuffer]) -> Write | None:
        return self.inner.connect(peer, metadata, buffers)

    def forget(self, peer: str) -> None:
        self.inner.forget(peer)

    def post(self, peer: str, rows: Rows, note: bytes) -> Write:
        nbytes = sum(len(here) * self._item_bytes[at] for at, here, _ in rows)
        self._free_at = max(self._free_at, self._clock()) + nbytes / self.bytes_per_s
        return _LinkWrite(self.inner.post(peer, rows, b""), self._free_at, self._clock)

    def poll_notes(self) -> list[bytes]:
        return self.inner.poll_notes()

    def close(self) -> None:
        self.inner.close()
