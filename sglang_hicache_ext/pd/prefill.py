"""The sending end: what an engine calls on the prefill side (see ``hooks.PrefillHooks``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sglang_hicache_ext.arbiter import Arbiter
from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.pd.endpoint import Endpoint
from sglang_hicache_ext.pd.geometry import PAGE_SPACE, PeerMismatchError, items_of, misplaced
from sglang_hicache_ext.pd.handshake import PREFILL, Peer, check_peer
from sglang_hicache_ext.pd.hooks import Chunk, Ready, Reservation, SendState, SendStatus, TransferKey
from sglang_hicache_ext.pd.links import Frame
from sglang_hicache_ext.pd.outgoing import ChunkSend
from sglang_hicache_ext.pd.sending import Sender
from sglang_hicache_ext.pd.transport import Write, WriteState
from sglang_hicache_ext.pd.wire import FrameType, pack_end, pack_words, unpack_end, unpack_reservation, unpack_words

log = logging.getLogger(__name__)

UNKNOWN = SendStatus(SendState.ABORTED, "not known (any more)", True)


class PrefillForward:
    """See ``hooks.Forward``."""

    def __init__(self, end: PrefillEndpoint, chunks: Sequence[Chunk]) -> None:
        self._end = end
        self._chunks = tuple(chunks)
        self._items: list[ChunkSend | None] | None = None

    def save_kv_layer(self, layer: int, ready: Ready | None = None) -> None:
        self._end._call(lambda: self._each(lambda item: item.saved.setdefault(layer, ready)))

    def finish(self, ready: Ready | None = None) -> None:
        def finished(item: ChunkSend) -> None:
            if not item.is_finished:
                item.is_finished, item.rest = True, ready

        self._end._call(lambda: self._each(finished))

    def wait_for_save(self, timeout_s: float) -> tuple[SendStatus, ...]:
        self._end._wait(self._is_over, timeout_s)
        return tuple(self._end.status(chunk.key) for chunk in self._chunks)

    def begin(self, items: list[ChunkSend | None]) -> None:
        """Owner thread: the chunks have been planned."""
        self._items = items

    def _each(self, do: Callable[[ChunkSend], Any]) -> None:
        for item in self._items or ():
            if item is not None:
                do(item)

    def _is_over(self) -> bool:
        items = self._items
        return items is not None and all(
            item is None or item.is_done or self._end.status(chunk.key).state is not SendState.OPEN
            for item, chunk in zip(items, self._chunks, strict=True)
        )


class SendDrain:
    """Done once the pages of a send may be used for something else."""

    def __init__(self, end: PrefillEndpoint, key: TransferKey) -> None:
        self._end, self._key = end, key

    def is_done(self) -> bool:
        return self._end.status(self._key).is_settled

    def wait(self, timeout_s: float) -> bool:
        return self._end._wait(self.is_done, timeout_s)


class PrefillEndpoint(Endpoint):
    """Implements ``hooks.PrefillHooks``."""

    role = PREFILL

    def _prepare(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._warming: dict[str, Write] = {}
        self._unusable: set[str] = set()
        self._arbiter = Arbiter(self.settings.arbiter) if self.settings.arbiter else None
        self._sends = Sender(
            self.planner, self._transport, self.settings, self.metrics, self._tell,
            None if self._transport.carries_notes else self._pass_note, self._announce, self._notify,
            self._unusable.add,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------- for other threads

    def reservations(self, room: int) -> tuple[Reservation, ...]:
        return tuple(dict(self._sends.rooms.get(room, {})).values())

    @property
    def rooms(self) -> tuple[int, ...]:
        """Rooms with an open reservation."""
        return tuple(dict(self._sends.rooms))

    def offer(self, reservation: Reservation) -> bool:
        taken: list[bool] = []
        self._call(lambda: taken.append(self._reserve(reservation)))
        return self._wait_for(taken)

    def start_save_kv(self, chunks: Sequence[Chunk], *, layered: bool = True) -> PrefillForward:
        forward = PrefillForward(self, chunks)

        def start() -> None:
            deadline = self._clock.now() + self.settings.deadline_s
            forward.begin([self._sends.start(chunk, deadline, layered=layered) for chunk in chunks])
            self._notify()

        self._call(start)
        return forward

    def status(self, key: TransferKey) -> SendStatus:
        send = self._sends.sends.get(key)
        return self._sends.ended.get(key, UNKNOWN) if send is None else send.shown

    def abort(self, key: TransferKey, reason: str) -> None:
        self._call(lambda: self._sends.abort(key, reason))

    def drain(self, key: TransferKey) -> SendDrain:
        return SendDrain(self, key)

    def forget(self, key: TransferKey) -> None:
        self._call(lambda: self._sends.forget(key))

    @property
    def peers(self) -> tuple[str, ...]:
        """Instances of the decode endpoints that have connected and are not known to be gone."""
        return tuple(self._peers)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "peers": len(self._peers), "open_sends": len(self._sends.sends)}

    def close(self, timeout_s: float = 5.0) -> None:
        if self._is_closed:
            return
        self._call(lambda: self._give_up("the prefill side is closing"))
        self._wait(lambda: not self._inbox and not any(s.posted for s in list(self._sends.sends.values())), timeout_s)
        self._stop()
        if self._arbiter is not None:
            self._arbiter.close()

    def _wait_for(self, taken: list[bool]) -> bool:
        if self._thread is None:
            self.step(0.0)
        deadline = time.monotonic() + 1.0
        while not taken and time.monotonic() < deadline and not self._is_closed:
            self._wait(lambda: bool(taken), 0.05)
        return bool(taken and taken[0])

    # ------------------------------------------------------------------------------------------------- owner thread

    def _announce(self, nbytes: int) -> AbstractContextManager[None]:
        return self._arbiter.pd(nbytes) if self._arbiter is not None else nullcontext()

    def _tell(self, key: TransferKey, state: SendState, reason: str) -> None:
        self._links.send(key.peer, FrameType.SETTLED, pack_end(key, reason))

    def _pass_note(self, peer: str, note: bytes) -> None:
        self._links.send(peer, FrameType.GROUP, note)

    def _on_frame(self, event: Frame) -> None:
        if event.kind is FrameType.HELLO:
            self._greet(event)
        elif event.peer not in self._peers:
            self._links.drop(event.peer)
        elif event.kind is FrameType.RESERVE:
            reservation = unpack_reservation(event.body)
            if reservation.key.peer == event.peer:
                self._reserve(reservation)
        elif event.kind is FrameType.ABORT:
            key, reason = unpack_end(event.body, event.peer)
            self._sends.abort(key, reason or "aborted by the decode side", asked=True)
        elif event.kind is FrameType.REFUSED:
            self._links.drop(event.peer)

    def _greet(self, event: Frame) -> None:
        mine = self.identity.words()
        try:
            peer = check_peer(mine, unpack_words(event.body))
            self._links.rename(event.peer, peer.name)
            self._links.send(peer.name, FrameType.HELLO, pack_words(mine))
            if peer.name in self._peers and self._sends.has_posted(peer.name):
                self._links.send(peer.name, FrameType.READY)  # the old path still has to be emptied
                return
            self._transport.forget(peer.name)
            warm = self._transport.connect(peer.name, peer.metadata, peer.buffers)
        except (PeerMismatchError, StoreError) as e:
            log.warning("PD: a decode endpoint was refused: %s", e)
            self.metrics.add("pd_refused_peers")
            refused = event.peer if isinstance(e, PeerMismatchError) else peer.name
            self._links.send(refused, FrameType.REFUSED, pack_words({**mine, "reason": str(e)}))
            self._links.drop(refused)
            return
        self._peers[peer.name] = peer
        if warm is None:
            self._links.send(peer.name, FrameType.READY)
        else:
            self._warming[peer.name] = warm

    def _reserve(self, reservation: Reservation) -> bool:
        peer = self._peers.get(reservation.key.peer)
        if peer is None:
            return False
        for space, items in ((PAGE_SPACE, reservation.pages), *reservation.extra.items()):
            why = misplaced(space, items, items_of(peer.buffers, space), "the decode side")
            if why:
                self._tell(reservation.key, SendState.FAILED, why)
                return False
        return self._sends.offer(reservation)

    def _on_lost(self, peer: str, reason: str) -> None:
        self._sends.lost(peer, f"the link to the decode side is down: {reason}")
        if peer in self._peers:
            self._prove_end(peer, self._peers[peer].address)

    def _on_gone(self, peer: str) -> None:
        self._sends.gone(peer)
        self._advance(self._clock.now())
        self._warming.pop(peer, None)
        if self._peers.pop(peer, None) is not None:
            self._transport.forget(peer)
        self._notify()

    def _advance(self, now: float) -> bool:
        for name, warm in list(self._warming.items()):
            state = warm.state()
            if state is WriteState.PENDING:
                continue
            del self._warming[name]
            warm.release()
            if state is WriteState.DONE:
                self._links.send(name, FrameType.READY)
            else:
                self._links.drop(name)
        is_busy = self._sends.step(now) or bool(self._warming)
        while self._unusable:
            peer = self._unusable.pop()
            if self._links.is_up(peer):
                self._links.drop(peer)  # the decode side will find us alive and connect anew
                self._on_lost(peer, "a write to it failed")
        return is_busy

    def _give_up(self, reason: str) -> None:
        for key in list(self._sends.sends):
            self._sends.abort(key, reason)
        self._notify()
