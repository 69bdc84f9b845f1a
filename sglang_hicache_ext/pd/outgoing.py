"""One send on its way: its chunks, its writes, and when its pages are free again. Changed by ``sending.Sender`` alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from sglang_hicache_ext.pd.groups import Group
from sglang_hicache_ext.pd.hooks import Chunk, Ready, Reservation, SendState, SendStatus, TransferKey
from sglang_hicache_ext.pd.transport import Write

OPEN = SendStatus(SendState.OPEN, "", False)


@dataclass(slots=True, eq=False)
class ChunkSend:
    """A chunk under way.

    Attributes:
        groups: of its pages, in layer order; posted from the front.
        saved: layer -> the event after which it is written.
        rest: event after which every layer is written; valid once ``is_finished``.
        is_done: every group of it is in place. The only field that other threads read.
    """

    chunk: Chunk
    groups: list[Group]
    extra: Group | None
    saved: dict[int, Ready | None] = field(default_factory=dict)
    is_finished: bool = False
    rest: Ready | None = None
    posted: int = 0
    extra_posted: bool = False
    in_flight: int = 0
    is_done: bool = False

    @property
    def is_posted(self) -> bool:
        return self.posted == len(self.groups) and (self.extra is None or self.extra_posted)

    def is_written(self, start: int, stop: int) -> bool:
        """Whether layers [start, stop) of its pages hold their final bytes."""
        if self.chunk.ready is not None and not self.chunk.ready.is_done():
            return False
        for layer in range(start, stop):
            if layer in self.saved:
                event = self.saved[layer]
            elif self.is_finished:
                event = self.rest
            else:
                return False
            if event is not None and not event.is_done():
                return False
        return True


@dataclass(slots=True, eq=False)
class Posted:
    """A write in flight and what is announced with it."""

    item: ChunkSend
    write: Write
    note: bytes
    announced: AbstractContextManager[None]
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class Send:
    """All chunks of one reservation. Other threads read ``reservation`` and ``shown`` only."""

    reservation: Reservation
    state: SendState = SendState.OPEN
    reason: str = ""
    deadline: float = float("inf")
    chunks: list[ChunkSend] = field(default_factory=list)
    posted: list[Posted] = field(default_factory=list)
    has_last: bool = False
    covered: int = 0
    is_started: bool = False
    is_told: bool = False
    is_forgotten: bool = False
    asked: bool = False
    shown: SendStatus = OPEN

    @property
    def key(self) -> TransferKey:
        return self.reservation.key

    @property
    def is_whole(self) -> bool:
        """Whether chunks for all reserved pages have been begun, the last one among them; they may come in any order."""
        return self.has_last and self.covered >= len(self.reservation.pages)

    @property
    def is_settled(self) -> bool:
        """No write of it reads this side's pages any more, or none whose bytes anybody would take."""
        return self.state is not SendState.OPEN and all(p.is_lost for p in self.posted)

    @property
    def is_quiet(self) -> bool:
        """No byte of it can reach the peer's pages any more."""
        return self.state is not SendState.OPEN and not self.posted
