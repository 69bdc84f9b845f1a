"""The receiving end: what an engine calls on the decode side (see ``hooks.DecodeHooks``)."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import HiCacheExtError, InvariantError, StoreError
from sglang_hicache_ext.pd.endpoint import Endpoint
from sglang_hicache_ext.pd.geometry import PAGE_SPACE, misplaced
from sglang_hicache_ext.pd.handshake import DECODE, Peer, dial
from sglang_hicache_ext.pd.hooks import LoadRequest, LoadState, LoadStatus, Reservation, TransferKey
from sglang_hicache_ext.pd.links import Frame, TcpLinks
from sglang_hicache_ext.pd.receiving import Landing, Receiver
from sglang_hicache_ext.pd.wire import (
    U64,
    FrameType,
    WireError,
    pack_end,
    pack_reservation,
    pack_words,
    unpack_end,
    unpack_note,
)

log = logging.getLogger(__name__)

RESUME_TIMEOUT_S = 10.0


class DecodeLoad:
    """See ``hooks.Load``."""

    def __init__(self, end: DecodeEndpoint, landing: Landing) -> None:
        self._end, self._landing = end, landing

    @property
    def key(self) -> TransferKey:
        return self._landing.key

    @property
    def reservation(self) -> Reservation:
        return self._landing.reservation

    def status(self) -> LoadStatus:
        return self._landing.status

    def _is_open(self) -> bool:
        return self._landing.status.state in (LoadState.RESERVED, LoadState.LANDING)

    def _has_landed(self, layer: int) -> bool:
        if self._landing.status.state is LoadState.COMPLETE:
            return True
        row = self._end.receiver.row(layer)
        if row is None or not self._is_open():
            return False  # buffers of other spaces land with the last group
        return bool(self._landing.landed[row].all())

    def wait_for_layer_load(self, layer: int, timeout_s: float) -> bool:
        self._end._wait(lambda: self._has_landed(layer) or not self._is_open(), timeout_s)
        return self._has_landed(layer)

    def lookahead(self, wanted: int, needs: Sequence[int]) -> int:
        return wanted if all(self._has_landed(layer) for layer in needs) else 0

    def publish(self) -> NDArray[np.int64]:
        landing = self._landing
        if landing.status.state is not LoadState.COMPLETE or landing.is_published or landing.is_released:
            raise InvariantError(f"load {landing.key} published while {landing.status.state}, or twice")
        landing.is_published = True
        self._end._call(lambda: self._end.receiver.release(landing))
        return landing.reservation.pages

    def abort(self, reason: str) -> None:
        self._end._call(lambda: self._end.receiver.abort(self._landing, reason))

    def release(self) -> LoadDrain:
        self._end._call(lambda: self._end.receiver.release(self._landing))
        return LoadDrain(self._end, self._landing)


class LoadDrain:
    """Done once no byte can reach the pages of a load any more."""

    def __init__(self, end: DecodeEndpoint, landing: Landing) -> None:
        self._end, self._landing = end, landing

    def is_done(self) -> bool:
        return self._landing.status.is_settled

    def wait(self, timeout_s: float) -> bool:
        return self._end._wait(self.is_done, timeout_s)


class DecodeEndpoint(Endpoint):
    """Implements ``hooks.DecodeHooks``."""

    role = DECODE

    def _prepare(self) -> None:
        self._addresses: dict[str, str] = {}
        self._connecting = threading.Lock()
        self._epochs = itertools.count(1)
        self.receiver = Receiver(self.planner, self.settings.drain_s, self.metrics, self._ask, self._notify)

    # ------------------------------------------------------------------------------------------- for other threads

    def connect(self, address: str, timeout_s: float) -> str:
        with self._connecting:
            known = next((name for name, at in self._addresses.items() if at == address), None)
            if known is not None and self._links.is_up(known):
                return known
            return self._dial(address, timeout_s).name

    def _dial(self, address: str, timeout_s: float) -> Peer:
        links = self._links
        if not isinstance(links, TcpLinks):
            raise StoreError("connect", "these links cannot be dialled", path=address)
        peer, sock = dial(address, self.identity.words(), timeout_s)
        adopted = threading.Event()

        def adopt() -> None:
            links.adopt(peer.name, sock)
            self._addresses[peer.name] = address
            adopted.set()

        self._call(adopt)
        if not adopted.wait(timeout_s):
            raise StoreError("connect", "the endpoint's thread does not answer", path=address, is_transient=True)
        return peer

    def is_connected(self, peer: str) -> bool:
        return self._links.is_up(peer)

    def start_load_kv(self, request: LoadRequest, *, announce: bool = True) -> DecodeLoad:
        reservation = Reservation(
            TransferKey(self.instance, request.room, next(self._epochs)),
            np.array(request.pages, np.int64, copy=True).reshape(-1),
            {space: np.array(items, np.int64, copy=True).reshape(-1) for space, items in request.extra.items()},
        )
        why = self._misfit(request, reservation)
        if why:
            self.metrics.add("pd_load_failed")
            empty = np.zeros((0, 0), np.bool_)
            status = LoadStatus(LoadState.FAILED, why, True, 0)
            return DecodeLoad(
                self,
                Landing(reservation, request.peer, 0.0, empty, False, LoadState.FAILED, why, 0, True, status=status),
            )
        deadline = self._clock.now() + request.deadline_s
        landing = self.receiver.add(reservation, request.peer, deadline)
        if announce:
            body = pack_reservation(reservation)
            self._call(lambda: self._reserve(landing, body))
        else:
            self._call(lambda: None)
        return DecodeLoad(self, landing)

    def _misfit(self, request: LoadRequest, reservation: Reservation) -> str:
        if self._is_closed:
            return "the endpoint is closed"
        if not self._links.is_up(request.peer):
            return f"not connected to {request.peer}"
        if not 0 <= request.room < U64:
            return f"room {request.room} is no 64-bit number"
        if len(self.receiver.loads) >= self.settings.max_open:
            return f"{self.settings.max_open} loads are open"
        if frozenset(reservation.extra) != self.planner.extra_spaces:
            return f"spaces {sorted(reservation.extra)} are given, {sorted(self.planner.extra_spaces)} are registered"
        for space, items in ((PAGE_SPACE, reservation.pages), *reservation.extra.items()):
            if len(np.unique(items)) != len(items):
                return f"a {space} id is given twice"
            why = misplaced(space, items, self.geometry.items(space), "the decode side")
            if why:
                return why
        return ""

    @property
    def quarantined_pages(self) -> int:
        return self.receiver.quarantined_pages

    def describe(self) -> dict[str, Any]:
        loads = {"open_loads": len(self.receiver.loads), "quarantined_pages": self.quarantined_pages}
        return {**super().describe(), **loads}

    def close(self, timeout_s: float = 5.0) -> None:
        if self._is_closed:
            return
        self._call(lambda: self._give_up("the decode side is closing"))
        self._wait(lambda: not self._inbox and all(load.is_settled for load in self.receiver.loads), timeout_s)
        self._stop()

    # ------------------------------------------------------------------------------------------------- owner thread

    def _reserve(self, landing: Landing, body: bytes) -> None:
        if landing.is_open and not self._links.send(landing.peer, FrameType.RESERVE, body):
            self.receiver.abort(landing, "the link to the prefill side is down")

    def _ask(self, peer: str, key: TransferKey, reason: str) -> None:
        self._links.send(peer, FrameType.ABORT, pack_end(key, reason))

    def _on_frame(self, event: Frame) -> None:
        if event.peer.startswith("?"):
            if event.kind is FrameType.HELLO:  # it takes us for a prefill endpoint: say who we are
                self._links.send(event.peer, FrameType.REFUSED, pack_words(self.identity.words()))
            self._links.drop(event.peer)
        elif event.kind is FrameType.SETTLED:
            self._take_notes()
            self.receiver.on_settled(*unpack_end(event.body, self.instance))
        elif event.kind is FrameType.GROUP:
            self.receiver.on_note(unpack_note(event.body))

    def _take_notes(self) -> None:
        for data in self._transport.poll_notes():
            self._progress += 1
            try:
                self.receiver.on_note(unpack_note(data))
            except WireError:
                self.metrics.add("pd_late_groups")

    def _on_lost(self, peer: str, reason: str) -> None:
        self._take_notes()
        self.receiver.lost(peer, f"the link to the prefill side is down: {reason}")
        address = self._addresses.get(peer)
        if address is not None:
            self._prove_end(peer, address)

    def _on_alive(self, peer: str, address: str) -> None:
        while not self._is_closed and not self._links.is_up(peer):
            try:
                found = self._dial(address, RESUME_TIMEOUT_S)
            except HiCacheExtError as e:
                log.warning("PD: %s cannot be reached again yet: %s", peer, e)
                time.sleep(1.0)
                self._prove_end(peer, address)
                return
            if found.name != peer:
                self._call(lambda: self._on_gone(peer))
                return

    def _on_gone(self, peer: str) -> None:
        self._take_notes()
        self.receiver.gone(peer)
        self._addresses.pop(peer, None)

    def _advance(self, now: float) -> bool:
        self._take_notes()
        return self.receiver.step(now)

    def _give_up(self, reason: str) -> None:
        for load in self.receiver.loads:
            self.receiver.release(load)
            self.receiver.abort(load, reason)
        self._notify()
