"""What an engine calls. The prefill side saves layers as it computes them, the decode side loads them.

No call here raises for a peer's fault at run time: the state says what happened, with a reason. Calls are thread-safe and
do not touch the network; a thread of the endpoint's own posts, polls and keeps the deadlines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.ports import Drain


class Ready(Protocol):
    """An event of the engine, for example a wrapped CUDA event: is what came before it in the stream done?"""

    def is_done(self) -> bool:
        """Never blocks; called on the endpoint's thread."""
        ...


class SendState(StrEnum):
    OPEN = "open"  # chunks may be added; groups are posted as their layers come
    SENT = "sent"  # the last chunk and every group before it are in place at the peer
    FAILED = "failed"  # peer gone, write failed, deadline
    ABORTED = "aborted"  # either side gave it up


class LoadState(StrEnum):
    RESERVED = "reserved"  # slots are set aside, nothing has landed
    LANDING = "landing"  # some groups are in place
    COMPLETE = "complete"  # every page of every layer is in place: may be published
    FAILED = "failed"  # the sender or its peer ended it
    TIMED_OUT = "timed_out"  # deadline; slots stay in quarantine until the sender is done or gone
    ABORTED = "aborted"  # given up here; slots as above


@dataclass(frozen=True, slots=True)
class TransferKey:
    """One attempt of one request between one pair.

    Attributes:
        peer: instance id of the decode endpoint.
        room: the request's number, shared by both sides.
        epoch: of the attempt; grows with every reservation of that decode endpoint, so slots used again differ in it.
    """

    peer: str
    room: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where a decode endpoint wants the pages of a request.

    Attributes:
        pages: [n] int64 page ids at the decode side, in the order of the tokens that prefill has to send.
        extra: further index spaces ("aux", "state"): [m] int64 item ids at the decode side.
    """

    key: TransferKey
    pages: NDArray[np.int64]
    extra: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The pages that one forward makes for one request.

    Attributes:
        key: from the reservation.
        first: position of ``pages[0]`` in ``Reservation.pages``. Chunks of a key may come in any order.
        pages: [n] int64 page ids at the prefill side; n may be 0 in a last chunk.
        is_last: no chunk after it; ``extra`` goes with it.
        extra: item ids at the prefill side of every further index space, as many as reserved.
        ready: pages that were in the cache before may be sent after this (a load-back, a copy); None: at once.
    """

    key: TransferKey
    first: int
    pages: NDArray[np.int64]
    is_last: bool
    extra: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    ready: Ready | None = None


@dataclass(frozen=True, slots=True)
class SendStatus:
    """Attributes:
    state: see SendState.
    reason: one sentence; "" while nothing is wrong.
    is_settled: no write of it can move a byte any more; its pages may be used again.
    """

    state: SendState
    reason: str
    is_settled: bool


class Forward(Protocol):
    """One forward on the prefill side, over the chunks of its batch."""

    def save_kv_layer(self, layer: int, ready: Ready | None = None) -> None:
        """Layer ``layer`` of every chunk is written (after ``ready``). A full group is posted from the endpoint's thread.

        Layers may be reported in any order, each once; a second report is ignored. Costs a lock and an append.
        """
        ...

    def finish(self, ready: Ready | None = None) -> None:
        """The forward is over: every layer not reported yet is written (after ``ready``), extra spaces included.

        A forward whose layers cannot be seen (a captured graph) calls only this: the chunk then goes whole.
        """
        ...

    def wait_for_save(self, timeout_s: float) -> tuple[SendStatus, ...]:
        """Wait until every chunk of this forward is in place or has failed, at most ``timeout_s``; one status a chunk."""
        ...


class PrefillHooks(Protocol):
    """The sending end. One per process and registered pool."""

    @property
    def address(self) -> str:
        """host:port that decode endpoints connect to."""
        ...

    @property
    def rooms(self) -> tuple[int, ...]:
        """Rooms with an open reservation."""
        ...

    def reservations(self, room: int) -> tuple[Reservation, ...]:
        """The newest open reservation of ``room`` of each decode endpoint; empty before one came."""
        ...

    def offer(self, reservation: Reservation) -> bool:
        """Take a reservation that came another way than by ``DecodeHooks.start_load_kv``. False: refused (aborted before,
        unknown peer, more than may be open)."""
        ...

    def start_save_kv(self, chunks: Sequence[Chunk], *, layered: bool = True) -> Forward:
        """Begin a forward. Groups are planned per chunk by bytes; short prompts and ``layered=False`` go whole at ``finish``."""
        ...

    def status(self, key: TransferKey) -> SendStatus:
        """State of a send; a key that is not known (any more) is ABORTED and settled."""
        ...

    def abort(self, key: TransferKey, reason: str) -> None:
        """Post nothing more of it; the decode side is told once all that was posted has settled."""
        ...

    def drain(self, key: TransferKey) -> Drain:
        """Done once the pages of ``key`` may be used for something else."""
        ...

    def forget(self, key: TransferKey) -> None:
        """The engine has read the final status; to be called for every key it has started. An unsettled one is kept
        until it is settled. A send that was never started goes by itself."""
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Abort, settle what can be settled, stop the thread. Idempotent, bounded."""
        ...


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What the decode side wants.

    Attributes:
        peer: name that ``connect`` returned.
        room: the request's number.
        pages: [n] int64 pages to fill, reserved by the caller, of nobody else until the load is settled.
        extra: further index spaces, item ids here.
        deadline_s: seconds from now until it counts as timed out.
    """

    peer: str
    room: int
    pages: NDArray[np.int64]
    deadline_s: float
    extra: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """Attributes:
    state: see LoadState.
    reason: one sentence; "" while nothing is wrong.
    is_settled: no byte can arrive any more.
    landed_pages: pages of which every layer is in place.
    """

    state: LoadState
    reason: str
    is_settled: bool
    landed_pages: int


class Load(Protocol):
    """One load on the decode side. The scheduler's contract: pages given to it are reserved; they are nobody's cache until
    ``publish`` returned them; they are free again only after ``release`` (now) or its drain (later)."""

    @property
    def key(self) -> TransferKey: ...

    @property
    def reservation(self) -> Reservation:
        """For a caller that carries it to prefill itself."""
        ...

    def status(self) -> LoadStatus:
        """From memory; never blocks."""
        ...

    def wait_for_layer_load(self, layer: int, timeout_s: float) -> bool:
        """Block until ``layer`` of every page has landed, the load ended, or ``timeout_s``; True when it landed."""
        ...

    def lookahead(self, wanted: int, needs: Sequence[int]) -> int:
        """Draft tokens that may be proposed now: ``wanted`` once all layers in ``needs`` have landed, 0 before."""
        ...

    def publish(self) -> NDArray[np.int64]:
        """Hand the pages over to the cache. Only when COMPLETE, only once; InvariantError otherwise."""
        ...

    def abort(self, reason: str) -> None:
        """Give it up. Groups that still come are dropped; its pages drain."""
        ...

    def release(self) -> Drain:
        """The caller is through with a load it did not publish (aborts it where needed); the pages are free once the
        returned drain is done."""
        ...


class DecodeHooks(Protocol):
    """The receiving end. One per process and registered pool."""

    def connect(self, address: str, timeout_s: float) -> str:
        """Connect to a prefill endpoint, check both geometries, warm the path; returns the peer's name. Idempotent.

        Raises:
            PeerMismatchError: naming each differing fact with both values.
            StoreError: it cannot be reached within ``timeout_s``.
        """
        ...

    def start_load_kv(self, request: LoadRequest, *, announce: bool = True) -> Load:
        """Reserve and, unless the caller carries the reservation itself, tell prefill. A load that cannot start is FAILED
        and settled."""
        ...

    def is_connected(self, peer: str) -> bool:
        """False once the peer is gone; ``connect`` again then."""
        ...

    @property
    def quarantined_pages(self) -> int:
        """Pages of ended loads that may still be written to."""
        ...

    def close(self, timeout_s: float = 5.0) -> None: ...
