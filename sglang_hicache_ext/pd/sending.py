"""The sending half of the protocol as a state machine: which group goes when, and when pages are free again.

Owner thread only. No threads, no sockets, no clock of its own: ``step(now)`` moves it on, so a seeded simulation can.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.pd.geometry import PAGE_SPACE, misplaced
from sglang_hicache_ext.pd.groups import Group, GroupPlanner
from sglang_hicache_ext.pd.hooks import Chunk, Reservation, SendState, SendStatus, TransferKey
from sglang_hicache_ext.pd.outgoing import ChunkSend, Posted, Send
from sglang_hicache_ext.pd.settings import PdSettings
from sglang_hicache_ext.pd.transport import Rows, Transport, WriteState
from sglang_hicache_ext.pd.wire import Note, NoteKind

WINDOW = 4
"""Groups in flight to one peer: enough to keep a link busy, few enough that they end one after the other."""
TOMBSTONES = 4096
"""Epochs aborted before their reservation came, remembered per peer."""
REMEMBERED = 1024
"""Ended sends whose last status can still be asked for."""

Tell = Callable[[TransferKey, SendState, str], None]


class Sender:
    """The sends of one endpoint.

    Args:
        tell: called once per send that ended otherwise than SENT, when no byte of it can move any more.
        pass_note: hands a note to the peer where the driver carries none; None where it does.
        announce: context of a transfer of so many bytes (the arbiter's ``pd``).
        changed: called after what other threads see has changed.
        broken: called with a peer to which a write failed; the path to it is of no use any more.
    """

    def __init__(
        self, planner: GroupPlanner, transport: Transport, settings: PdSettings, metrics: Metrics, tell: Tell,
        pass_note: Callable[[str, bytes], None] | None = None,
        announce: Callable[[int], AbstractContextManager[None]] = lambda nbytes: nullcontext(),
        changed: Callable[[], None] = lambda: None,
        broken: Callable[[str], None] = lambda peer: None,
    ) -> None:  # fmt: skip
        self._planner, self._transport, self._settings = planner, transport, settings
        self._metrics, self._tell, self._pass_note, self._announce = metrics, tell, pass_note, announce
        self._changed, self._broken = changed, broken
        self.sends: dict[TransferKey, Send] = {}
        self.ended: OrderedDict[TransferKey, SendStatus] = OrderedDict()
        self.rooms: dict[int, dict[str, Reservation]] = {}
        self._tombs: dict[str, OrderedDict[int, None]] = {}
        self._forgotten_to: dict[str, int] = {}
        self._gone: set[str] = set()

    # ------------------------------------------------------------------------------------------- what is told to it

    def check(self, reservation: Reservation) -> str:
        """Why a reservation cannot be taken; "" when it can."""
        key, extra = reservation.key, frozenset(reservation.extra)
        if key in self.sends:
            return "this epoch is open already"
        if key.epoch in self._tombs.get(key.peer, ()) or key.epoch <= self._forgotten_to.get(key.peer, -1):
            return "aborted before it came"
        if len(self.sends) >= self._settings.max_open:
            return f"{len(self.sends)} transfers are open"
        if extra != self._planner.extra_spaces:
            return f"spaces {sorted(extra)} are reserved, {sorted(self._planner.extra_spaces)} are registered"
        return ""

    def offer(self, reservation: Reservation) -> bool:
        """Take a reservation. False: refused, and the peer is told so."""
        why = self.check(reservation)
        if why and why != "this epoch is open already":
            self._metrics.add("pd_refused_reservations")
            self._tell(reservation.key, SendState.ABORTED, why)
        if not why:
            self.sends[reservation.key] = Send(reservation)
            self.rooms.setdefault(reservation.key.room, {})[reservation.key.peer] = reservation
            self._changed()
        return not why

    def start(self, chunk: Chunk, deadline: float, *, layered: bool) -> ChunkSend | None:
        """Begin a chunk; None when its send is over or the chunk does not fit the reservation (which then fails)."""
        send = self.sends.get(chunk.key)
        if send is None or send.state is not SendState.OPEN:
            return None
        why = self._misfit(send, chunk)
        if why:
            self._end(send, SendState.FAILED, why)
            return None
        groups = list(self._planner.plan(len(chunk.pages), layered=layered))
        has_extra = chunk.is_last and any(len(items) for items in chunk.extra.values())
        item = ChunkSend(chunk, groups, self._planner.extra if has_extra else None)
        send.chunks.append(item)
        send.is_started = True
        send.has_last = send.has_last or chunk.is_last
        send.covered += len(chunk.pages)
        item.is_done = item.is_posted  # nothing to send at all
        send.deadline = deadline
        self._metrics.add("pd_chunks_layered" if len(groups) > 1 else "pd_chunks_whole")
        return item

    def _misfit(self, send: Send, chunk: Chunk) -> str:
        wanted = len(send.reservation.pages)
        for space, items in ((PAGE_SPACE, chunk.pages), *chunk.extra.items()):
            why = misplaced(space, items, self._planner.geometry.items(space), "the prefill side")
            if why:
                return why
        if chunk.first < 0 or chunk.first + len(chunk.pages) > wanted:
            return f"pages {chunk.first} to {chunk.first + len(chunk.pages)} of {wanted} reserved"
        if send.has_last and chunk.is_last:
            return "a second last chunk"
        if chunk.is_last:
            here = {name: len(items) for name, items in chunk.extra.items()}
            there = {name: len(items) for name, items in send.reservation.extra.items()}
            if here != there:
                return f"extra items {here} for {there} reserved"
        return ""

    def abort(self, key: TransferKey, reason: str, *, asked: bool = False) -> None:
        """Post nothing more of ``key``. ``asked``: the peer wants to hear when it is settled, known here or not."""
        send = self.sends.get(key)
        if send is None:
            if asked:
                self._bury(key)
                self._tell(key, SendState.ABORTED, reason)
            return
        send.asked = send.asked or asked
        if send.state is SendState.OPEN:
            self._end(send, SendState.ABORTED, reason)
        elif asked:
            send.is_told = False

    def lost(self, peer: str, reason: str) -> None:
        """The link to ``peer`` is down: its sends fail."""
        for send in list(self.sends.values()):
            if send.key.peer == peer and send.state is SendState.OPEN:
                self._end(send, SendState.FAILED, reason)

    def has_posted(self, peer: str) -> bool:
        """Whether a write to ``peer`` is in flight."""
        return any(send.posted for send in self.sends.values() if send.key.peer == peer)

    def gone(self, peer: str) -> None:
        """``peer`` does not live any more: nothing of it needs to be kept."""
        self.lost(peer, "the decode side is gone")
        self._gone.add(peer)
        self._tombs.pop(peer, None)
        self._forgotten_to.pop(peer, None)

    def forget(self, key: TransferKey) -> None:
        send = self.sends.get(key)
        if send is not None:
            send.is_forgotten = True
            if send.state is SendState.OPEN:
                self._end(send, SendState.ABORTED, "forgotten while open")

    def _bury(self, key: TransferKey) -> None:
        tombs = self._tombs.setdefault(key.peer, OrderedDict())
        tombs[key.epoch] = None
        if len(tombs) > TOMBSTONES:
            oldest, _ = tombs.popitem(last=False)
            self._forgotten_to[key.peer] = max(oldest, self._forgotten_to.get(key.peer, -1))

    # ---------------------------------------------------------------------------------------------------- one round

    def step(self, now: float) -> bool:
        """Post what may go, see what has ended; True while anything is under way."""
        in_flight: dict[str, int] = {}
        for send in self.sends.values():
            self._reap(send)
            in_flight[send.key.peer] = in_flight.get(send.key.peer, 0) + sum(not p.is_lost for p in send.posted)
        for send in list(self.sends.values()):
            if send.state is SendState.OPEN and now >= send.deadline:
                self._metrics.add("pd_send_timeouts")
                self._end(send, SendState.FAILED, "the deadline passed before every group was in place")
            if send.state is SendState.OPEN:
                self._post_ready(send, in_flight)
            self._conclude(send)
        return any(s.posted or (s.chunks and s.state is SendState.OPEN) for s in self.sends.values())

    def _reap(self, send: Send) -> None:
        for item in list(send.posted):
            state = item.write.state()
            if state is WriteState.PENDING and send.key.peer not in self._gone:
                continue
            if state is WriteState.DONE and self._pass_note is not None and send.state is SendState.OPEN:
                self._pass_note(send.key.peer, item.note)
            if state is not WriteState.DONE and send.state is SendState.OPEN:
                self._end(send, SendState.FAILED, "a write to the decode side failed")
                self._broken(send.key.peer)
            if state is WriteState.LOST and send.key.peer not in self._gone:
                item.is_lost = True
                continue
            item.announced.__exit__(None, None, None)
            item.write.release()
            send.posted.remove(item)
            item.item.in_flight -= 1
            if state is WriteState.DONE and item.item.is_posted and not item.item.in_flight:
                item.item.is_done = True
                self._changed()

    def _post_ready(self, send: Send, in_flight: dict[str, int]) -> None:
        peer = send.key.peer
        for item in send.chunks:
            while item.posted < len(item.groups) and in_flight[peer] < WINDOW:
                group = item.groups[item.posted]
                if not item.is_written(group.start, group.stop):
                    break
                if not self._post(send, item, group, NoteKind.PAGES):
                    return
                item.posted += 1
                in_flight[peer] += 1
            if item.extra is None or item.extra_posted or item.posted < len(item.groups):
                continue
            if item.is_finished and item.is_written(item.extra.start, item.extra.stop):
                if not self._post(send, item, item.extra, NoteKind.EXTRA):
                    return
                item.extra_posted = True
        send.chunks = [c for c in send.chunks if not c.is_posted]

    def _post(self, send: Send, item: ChunkSend, group: Group, kind: NoteKind) -> bool:
        rows, nbytes = self._rows(send, item.chunk, group, kind)
        chunk, key = item.chunk, send.key
        note = Note(
            kind, key.room, key.epoch, chunk.first, len(chunk.pages), group.start, group.stop, chunk.is_last
        ).pack()
        announced = self._announce(nbytes)
        announced.__enter__()
        try:
            write = self._transport.post(key.peer, rows, note)
        except StoreError as e:
            announced.__exit__(None, None, None)
            self._end(send, SendState.FAILED, str(e))
            self._broken(key.peer)
            return False
        send.posted.append(Posted(item, write, note, announced))
        item.in_flight += 1
        self._metrics.add("pd_groups_sent")
        self._metrics.add("pd_bytes_sent", nbytes)
        return True

    def _rows(self, send: Send, chunk: Chunk, group: Group, kind: NoteKind) -> tuple[Rows, int]:
        rows, nbytes, there = [], 0, send.reservation
        for position in group.buffers:
            buffer = self._planner.geometry.buffers[position]
            if kind is NoteKind.PAGES:
                local, remote = chunk.pages, there.pages[chunk.first : chunk.first + len(chunk.pages)]
            else:
                local, remote = chunk.extra[buffer.space], there.extra[buffer.space]
            rows.append((position, np.asarray(local, np.int64), remote))
            nbytes += len(local) * buffer.item_bytes
        return rows, nbytes

    # ------------------------------------------------------------------------------------------------------ the end

    def _end(self, send: Send, state: SendState, reason: str) -> None:
        send.state, send.reason = state, reason
        send.chunks.clear()
        self._leave_room(send)
        self._metrics.add(f"pd_send_{state}")

    def _conclude(self, send: Send) -> None:
        if send.state is SendState.OPEN:
            if send.is_whole and not send.chunks and not send.posted:
                self._end(send, SendState.SENT, "")
            else:
                return
        shown = SendStatus(send.state, send.reason, send.is_settled)
        if shown != send.shown:
            send.shown = shown
            self._changed()
        if not send.is_quiet:
            return
        if not send.is_told and (send.asked or send.state is not SendState.SENT):
            send.is_told = True
            self._tell(send.key, send.state, send.reason)
        if send.is_forgotten or not send.is_started or send.key.peer in self._gone:
            self._keep_status(send)
            if send.key.peer not in self._gone:
                self._bury(send.key)
            del self.sends[send.key]
            self._leave_room(send)

    def _keep_status(self, send: Send) -> None:
        """An engine may still ask how a send ended that it never started; the last ones are remembered."""
        self.ended[send.key] = send.shown
        if len(self.ended) > REMEMBERED:
            self.ended.popitem(last=False)

    def _leave_room(self, send: Send) -> None:
        room = self.rooms.get(send.key.room, {})
        if room.get(send.key.peer) is send.reservation:
            room.pop(send.key.peer)
            if not room:
                self.rooms.pop(send.key.room, None)
