"""The prefill side: rooms of SGLang on one hand, sends of the endpoint on the other."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.pd.hooks import Chunk, PrefillHooks, Ready, SendState, TransferKey
from sglang_hicache_ext.sglang_adapter import pd_geometry
from sglang_hicache_ext.sglang_adapter.pd_wire import Announced

logger = logging.getLogger(__name__)

FAILED_ROOMS, FAILED_S = 4096, 30.0
"""Rooms that ended badly here, remembered so that a decode server that comes for one is told at once."""

ABORTED_S = 10.0
"""How long an aborted room is kept for a sender that still asks for its state."""
Rooms = OrderedDict[int, float]
Pages = NDArray[np.int64]


class EventReady:
    """A CUDA event as the endpoint asks for it."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())


class Layered(Protocol):
    """Pieces that were sent, or are being sent, layer by layer during a forward."""

    def take(self, room: int, first: int, pages: Pages) -> tuple[list[tuple[int, Pages]], str]:
        """Settle the pieces of a chunk; returns what is left to send (position, pages), and "" or why it cannot go on."""
        ...

    def forget(self, room: int) -> None: ...

    def describe(self) -> dict[str, int]: ...


@dataclass
class _Room:
    """One room that a sender has claimed. Scheduler thread only."""

    keys: list[TransferKey] = field(default_factory=list)
    is_handed_over: bool = False
    aborted_at: float = 0.0
    promises_due: float = 0.0


class SendSide:
    """What a prefill rank sends. Called on the scheduler thread, except ``announce``, ``kept`` and ``sweep`` (listener).

    Args:
        manager: SGLang's manager, for rooms, reasons and status messages.
        endpoint: the transfer endpoint.
        spaces: index spaces beside the pages that the endpoint's geometry has.
    """

    def __init__(self, manager: Any, endpoint: PrefillHooks, spaces: frozenset[str]) -> None:
        self._manager, self.endpoint, self._spaces = manager, endpoint, spaces
        self.layered: Layered | None = None
        self._rooms: dict[int, _Room] = {}
        self._lock = threading.Lock()
        self._heard: dict[int, float] = {}
        self._promised: dict[int, set[tuple[str, int]]] = {}
        self._withdrawn: dict[int, list[Announced]] = {}
        self._failed: Rooms = OrderedDict()
        self._ended: Rooms = OrderedDict()
        self._given_up: dict[int, tuple[float, str]] = {}
        self._never_asked: Rooms = OrderedDict()  # a request was here, no decode rank came
        self._never_claimed: Rooms = OrderedDict()  # a decode rank came, no request

    # ------------------------------------------------------------------------------------- listener

    def announce(self, found: Announced) -> None:
        """A decode rank wants a room: offer its pages, and call the room bootstrapped once every rank has spoken."""
        manager, room = self._manager, found.room
        if self._failed_lately(room):
            self._end(found, f"prefill {manager.local_ip}:{manager.rank_port} has given up room {room} already")
            return
        if found.reservation is not None and not self.endpoint.offer(found.reservation):
            self._refuse(found, f"prefill {manager.local_ip}:{manager.rank_port} did not take the reservation of room "
                                f"{room} from decode {found.endpoint}:{found.dst_port}: it was aborted, too many are open, "
                                "or the link between the two is gone")  # fmt: skip
            return
        with self._lock:
            self._heard.setdefault(room, time.monotonic())
            if found.is_promise:
                self._promised.setdefault(room, set()).add(found.source)
        infos = manager.transfer_infos.setdefault(room, {})
        infos[found.source] = found
        if len(infos) == found.required_dst_info_num:
            manager.resolve_kv_replica_factor(infos)
            manager.req_to_decode_prefix_len[room] = max(i.decode_prefix_len for i in infos.values())
            manager.update_status(room, _poll().WaitingForInput)

    def _failed_lately(self, room: int) -> bool:
        with self._lock:
            at = self._failed.get(room)
            return at is not None and room not in self._rooms and time.monotonic() - at < FAILED_S

    def give_up(self, room: int, reason: str) -> None:
        """A room that cannot go on, whether its request has come yet or not."""
        if room in self._manager.request_status:
            self._manager.record_failure(room, reason)
            self._manager.update_status(room, _poll().Failed)
            return
        now = time.monotonic()
        with self._lock:
            if now - self._ended.get(room, -FAILED_S) < FAILED_S:
                return  # it is about a request that was here and is over
            self._given_up = {r: e for r, e in self._given_up.items() if now - e[0] < FAILED_S}
            if len(self._given_up) < FAILED_ROOMS:
                self._given_up[room] = (now, reason)

    def _refuse(self, found: Announced, reason: str) -> None:
        self.give_up(found.room, reason)
        self._manager.send_kv_status_message(
            targets=[found.source], bootstrap_room=found.room, status=_poll().Failed, failure_reason=reason
        )

    def kept(self, room: int, source: tuple[str, int]) -> None:
        """A decode rank has loaded the prefix it promised."""
        with self._lock:
            self._promised.get(room, set()).discard(source)

    def withdraw(self, found: Announced) -> None:
        """A decode rank could not load what it promised and wants those pages too."""
        if found.reservation is not None and self.endpoint.offer(found.reservation):
            with self._lock:
                self._withdrawn.setdefault(found.room, []).append(found)
        else:
            self._refuse(found, f"prefill cannot send the withdrawn prefix of room {found.room}")

    def sweep(self, limit_s: float) -> None:
        """Refuse rooms that decode ranks announced and no request claimed."""
        now = time.monotonic()
        self._drop_aborted(now)
        with self._lock:
            late = [r for r, t in self._heard.items() if now - t > limit_s and r not in self._rooms]
            waiting = [r for r in self._rooms if r not in self._heard]
            waiting += [r for r, t in self._never_asked.items() if now - t < FAILED_S]
            for room in late:
                del self._heard[room]
                _remember(self._never_claimed, room, now)
        for room in late:
            infos = self._manager.transfer_infos.pop(room, {})
            self._manager.request_status.pop(room, None)
            for found in infos.values():
                named = f"rooms {waiting[:8]} wait here for a decode server" if waiting else "no room waits here"
                self._end(found, f"decode {found.endpoint}:{found.dst_port} asked for room {found.room}, but no request with"
                                 f" that room reached prefill {self._manager.local_ip}:{self._manager.rank_port} within"
                                 f" {limit_s:.0f} s; {named}")  # fmt: skip

    def _drop_aborted(self, now: float) -> None:
        """Rooms whose request was aborted between two chunks: SGLang does not come back to their senders."""
        with self._lock:
            old = [r for r, record in self._rooms.items() if record.aborted_at and now - record.aborted_at > ABORTED_S]
        for room in filter(self.is_settled, old):
            self.release(room)
            for table in ("transfer_infos", "request_status", "req_to_decode_prefix_len"):
                getattr(self._manager, table).pop(room, None)

    def _end(self, found: Announced, reason: str) -> None:
        logger.warning("%s", reason)
        if found.key is not None:
            self.endpoint.abort(found.key, reason)
        self._manager.send_kv_status_message(
            targets=[found.source], bootstrap_room=found.room, status=_poll().Failed, failure_reason=reason
        )

    # ------------------------------------------------------------------------------------- scheduler

    def claim(self, room: int) -> str:
        """A request of this room has come; returns "" or why it was given up before."""
        with self._lock:
            self._rooms[room] = _Room()
            at, reason = self._given_up.pop(room, (0.0, ""))
        return reason if time.monotonic() - at < FAILED_S else ""

    def waiting_elsewhere(self, room: int) -> list[int]:
        """Rooms that decode ranks announced and nobody claimed: where a request that waits may have been sent."""
        with self._lock:
            now = time.monotonic()
            lately = {r for r, t in self._never_claimed.items() if now - t < FAILED_S}
            return sorted({r for r in self._heard if r not in self._rooms and r != room} | lately)

    def send(
        self,
        room: int,
        pages: Pages,
        first: int,
        is_last: bool,
        *,
        aux_index: int | None,
        state_indices: Sequence[Any] | None,
        ready: Ready | None,
    ) -> None:
        """Hand over one chunk of SGLang's: what was not sent during the forward goes now, whole."""
        record = self._rooms.get(room)
        infos = list(self._manager.transfer_infos.get(room, {}).values())
        if record is None or not infos or self._manager.request_status.get(room) == _poll().Failed:
            return
        rest, problem = self.layered.take(room, first, pages) if self.layered is not None else ([(first, pages)], "")
        rest = [(at, p) for at, p in rest if len(p)]
        if problem:
            self._fail(room, problem)
            return
        if is_last and not rest:
            rest = [(first + len(pages), pages[:0])]
        for found in infos:
            if found.key is None:
                continue
            for number, (at, piece) in enumerate(rest):
                last = is_last and number == len(rest) - 1
                extra = pd_geometry.extra_items(
                    self._manager.kv_args, aux_index, state_indices, self._spaces if last else frozenset()
                )
                chunk = Chunk(found.key, at, piece, last, extra, ready)
                self.endpoint.start_save_kv([chunk], layered=False).finish()
        if is_last:
            record.is_handed_over = True
            record.promises_due = time.monotonic() + self._manager.bootstrap_timeout
            record.keys = [f.key for f in infos if f.key is not None]

    def _fail(self, room: int, reason: str) -> None:
        for found in list(self._manager.transfer_infos.get(room, {}).values()):
            if found.key is not None:
                self.endpoint.abort(found.key, reason)
        self._manager.conclude_failure(bootstrap_room=room, failure_reason=reason)

    def advance(self, room: int, rest_of: Any) -> None:
        """Turn the state of the sends into the room's status.

        Args:
            rest_of: called with the tokens [start, stop) of a withdrawn prefix; returns the request's pages.
        """
        record = self._rooms.get(room)
        if record is None or not record.is_handed_over or self._manager.request_status.get(room) == _poll().Failed:
            return
        self._send_withdrawn(room, record, rest_of)
        found = [self.endpoint.status(key) for key in record.keys]
        bad = next((s for s in found if s.state in (SendState.FAILED, SendState.ABORTED)), None)
        if bad is not None:
            self._fail(room, f"transfer {bad.state}: {bad.reason}")
        elif all(s.state is SendState.SENT for s in found) and self._promises_kept(room, record):
            self._manager.update_status(room, _poll().Success)

    def _send_withdrawn(self, room: int, record: _Room, rest_of: Any) -> None:
        with self._lock:
            withdrawn = self._withdrawn.pop(room, [])
        for found in withdrawn:
            assert found.key is not None and found.reservation is not None
            pages = rest_of(found.decode_prefix_len, len(found.reservation.pages))
            if pages is None:
                self._fail(room, "the withdrawn prefix is not at hand any more")
                return
            extra = {space: np.empty(0, np.int64) for space in self._spaces}
            self.endpoint.start_save_kv([Chunk(found.key, 0, pages, True, extra)], layered=False).finish()
            record.keys.append(found.key)

    def _promises_kept(self, room: int, record: _Room) -> bool:
        with self._lock:
            open_promises = bool(self._promised.get(room) or self._withdrawn.get(room))
        if open_promises and time.monotonic() > record.promises_due:
            self._fail(room, "the decode side never said whether the prefix it promised was loaded")
        return not open_promises

    def is_settled(self, room: int) -> bool:
        """Whether the room's source pages may be used again."""
        record = self._rooms.get(room)
        return record is None or all(self.endpoint.status(key).is_settled for key in record.keys)

    def abort(self, room: int, reason: str) -> None:
        record = self._rooms.get(room)
        if record is not None:
            record.aborted_at = time.monotonic()
        for found in list(self._manager.transfer_infos.get(room, {}).values()):
            if found.key is not None:
                self.endpoint.abort(found.key, reason)

    def describe(self) -> dict[str, Any]:
        with self._lock:
            open_rooms = {"rooms": len(self._rooms), "promised_rooms": sum(map(bool, self._promised.values()))}
        return {**open_rooms, **(self.layered.describe() if self.layered is not None else {})}

    def release(self, room: int) -> None:
        """The sender is through with the room."""
        record = self._rooms.get(room)
        with self._lock:
            if self._manager.request_status.get(room) == _poll().Failed:
                _remember(self._failed, room, time.monotonic())
                if room not in self._heard:
                    _remember(self._never_asked, room, time.monotonic())
            _remember(self._ended, room, time.monotonic())
            self._rooms.pop(room, None)
            self._heard.pop(room, None)
            self._promised.pop(room, None)
            self._withdrawn.pop(room, None)
        if self.layered is not None:
            self.layered.forget(room)
        for key in record.keys if record is not None else ():
            self.endpoint.forget(key)


def _remember(rooms: Rooms, room: int, now: float) -> None:
    rooms[room] = now
    while len(rooms) > FAILED_ROOMS:
        rooms.popitem(last=False)


def _poll() -> Any:
    from sglang.srt.disaggregation.base import KVPoll

    return KVPoll
