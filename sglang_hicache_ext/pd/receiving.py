"""The receiving half of the protocol as a state machine: what has landed, when it is complete, when slots are safe.

A load is judged by coverage: every layer of every page, and the extra items, each said to be in place by a note of this
epoch. No order is relied on, a note seen twice counts once, and a note of an ended epoch is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.pd.groups import GroupPlanner
from sglang_hicache_ext.pd.hooks import LoadState, LoadStatus, Reservation, TransferKey
from sglang_hicache_ext.pd.wire import Note, NoteKind

ASK_AGAIN_S = 1.0
"""How often a decode side asks whether an ended transfer has settled."""
STEP_CAP_S = 0.05
"""Most seconds one round counts for: a process that was stopped has not drained anything meanwhile."""
ENDED = frozenset({LoadState.FAILED, LoadState.TIMED_OUT, LoadState.ABORTED})


@dataclass(slots=True, eq=False)
class Landing:
    """A load under way.

    Attributes:
        landed: [page layers, pages] bool, one row per layer that has page buffers.
        drained_s: seconds of own progress since its sender's proven end.
    """

    reservation: Reservation
    peer: str
    deadline: float
    landed: NDArray[np.bool_]
    extra_missing: bool
    state: LoadState = LoadState.RESERVED
    reason: str = ""
    missing: int = 0
    is_settled: bool = False
    is_released: bool = False
    is_published: bool = False
    drained_s: float = 0.0
    ask_at: float = 0.0
    status: LoadStatus = field(default=LoadStatus(LoadState.RESERVED, "", False, 0))

    @property
    def key(self) -> TransferKey:
        return self.reservation.key

    @property
    def is_open(self) -> bool:
        return self.state in (LoadState.RESERVED, LoadState.LANDING)

    @property
    def quarantined_pages(self) -> int:
        return len(self.reservation.pages) if self.state in ENDED and not self.is_settled else 0


class Receiver:
    """The loads of one endpoint. Owner thread only, except ``add``, which any thread may call.

    Args:
        ask: tells the sender that a load has ended here and asks to hear when it is settled.
        changed: called after a load's status changed.
    """

    def __init__(
        self, planner: GroupPlanner, drain_s: float, metrics: Metrics,
        ask: Callable[[str, TransferKey, str], None], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._planner, self._drain_s, self._metrics = planner, drain_s, metrics
        self._ask, self._changed = ask, changed
        self._row = {layer: row for row, layer in enumerate(planner.page_layers)}
        self._loads: dict[int, Landing] = {}
        self._gone: set[str] = set()
        self._stepped_at: float | None = None

    @property
    def loads(self) -> list[Landing]:
        return list(self._loads.values())

    @property
    def quarantined_pages(self) -> int:
        return sum(load.quarantined_pages for load in self.loads)

    def add(self, reservation: Reservation, peer: str, deadline: float) -> Landing:
        """Expect the pages of ``reservation``; before the peer can know of it."""
        landed = np.zeros((len(self._row), len(reservation.pages)), np.bool_)
        has_extra = bool(self._planner.extra_spaces) and any(len(v) for v in reservation.extra.values())
        load = Landing(reservation, peer, deadline, landed, has_extra, missing=landed.size)
        if not load.missing and not has_extra:
            load.state, load.is_settled = LoadState.COMPLETE, True
            load.status = LoadStatus(LoadState.COMPLETE, "", True, len(reservation.pages))
        self._loads[reservation.key.epoch] = load
        return load

    def row(self, layer: int) -> int | None:
        """Row of ``layer`` in ``Landing.landed``; None for a layer without page buffers."""
        return self._row.get(layer)

    # ------------------------------------------------------------------------------------------- what is told to it

    def on_note(self, note: Note) -> None:
        load = self._loads.get(note.epoch)
        if load is None or not load.is_open or load.key.room != note.room:
            self._metrics.add("pd_late_groups")
            return
        if note.first + note.pages > load.landed.shape[1] or note.stop > self._planner.geometry.layers:
            self._end(load, LoadState.FAILED, f"prefill wrote pages or layers that were not reserved: {note}")
            return
        if note.kind is NoteKind.EXTRA:
            load.extra_missing = False
        else:
            rows = [self._row[layer] for layer in range(note.start, note.stop) if layer in self._row]
            view = load.landed[rows[0] : rows[-1] + 1, note.first : note.first + note.pages] if rows else None
            if view is not None:
                load.missing -= int(view.size - np.count_nonzero(view))
                view[:] = True
        self._metrics.add("pd_groups_landed")
        load.state = LoadState.LANDING
        if load.missing == 0 and not load.extra_missing:
            load.state, load.is_settled = LoadState.COMPLETE, True
            self._metrics.add("pd_load_complete")
        self._note_status(load)

    def on_settled(self, key: TransferKey, reason: str) -> None:
        """The sender has ended this epoch and no byte of it can move any more."""
        load = self._loads.get(key.epoch)
        if load is None or load.key.room != key.room:
            return
        if load.is_open:
            self._end(load, LoadState.FAILED, reason or "prefill ended it")
        if load.state in ENDED:
            self._settle(load)

    def lost(self, peer: str, reason: str) -> None:
        """The link to ``peer`` is down; nothing is proven about the process behind it."""
        for load in self.loads:
            if load.peer == peer and load.is_open:
                self._end(load, LoadState.FAILED, reason)

    def gone(self, peer: str) -> None:
        """The process behind ``peer`` has ended."""
        self._gone.add(peer)
        self.lost(peer, "the prefill side is gone")

    def abort(self, load: Landing, reason: str) -> None:
        if load.is_open:
            self._end(load, LoadState.ABORTED, reason)

    def release(self, load: Landing) -> None:
        """The caller has given its pages back, or published them."""
        load.is_released = True
        self.abort(load, "released")

    # ---------------------------------------------------------------------------------------------------- one round

    def step(self, now: float) -> bool:
        """Keep the deadlines and move quarantines on; True while notes may come."""
        passed = 0.0 if self._stepped_at is None else min(now - self._stepped_at, STEP_CAP_S)
        self._stepped_at = now
        for load in self.loads:
            if load.is_open and now >= load.deadline:
                self._metrics.add("pd_load_timeouts")
                self._end(load, LoadState.TIMED_OUT, "the deadline passed before every group was in place")
            if load.state in ENDED and not load.is_settled:
                self._drain(load, now, passed)
            if load.is_settled and load.is_released:
                self._loads.pop(load.key.epoch, None)
        return any(load.is_open or not load.is_settled for load in self.loads)

    def _drain(self, load: Landing, now: float, passed: float) -> None:
        if load.peer in self._gone:
            load.drained_s += passed
            if load.drained_s >= self._drain_s:
                self._settle(load)
        elif now >= load.ask_at:
            load.ask_at = now + ASK_AGAIN_S
            self._ask(load.peer, load.key, load.reason)

    def _settle(self, load: Landing) -> None:
        load.is_settled = True
        self._note_status(load)

    def _end(self, load: Landing, state: LoadState, reason: str) -> None:
        load.state, load.reason = state, reason
        self._metrics.add(f"pd_load_{state}")
        self._note_status(load)

    def _note_status(self, load: Landing) -> None:
        whole = load.landed.shape[1] if load.missing == 0 else 0
        if load.missing and load.state is LoadState.LANDING:
            whole = int(np.count_nonzero(load.landed.all(axis=0)))
        load.status = LoadStatus(load.state, load.reason, load.is_settled, whole)
        self._changed()
