"""One prefetch's life: its states, who owns its host pages, and the one outcome of each queried page.

Owner thread only. Every change of state goes through this module; an illegal one is an InvariantError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import InvariantError
from sglang_hicache_ext.outcome import Outcome, good_prefix
from sglang_hicache_ext.ports import Drain, Namespace


class State(StrEnum):
    QUEUED = "queued"  # accepted, waits for one of the bounded slots
    QUERYING = "querying"  # the hit query runs; no host page is held
    WAITING_HOST = "waiting_host"  # the hit is known, host pages are not there yet
    LOADING = "loading"  # host pages are leased, reads run
    LOADED = "loaded"  # every page of the lease arrived and was inserted
    STOPPED = "stopped"  # a poll ended it; what was complete is inserted
    FAILED = "failed"  # reads ended early; what was complete is inserted
    MISSED = "missed"  # nothing worth loading is stored
    ABORTED = "aborted"  # the request went away


TERMINAL = frozenset({State.LOADED, State.STOPPED, State.FAILED, State.MISSED, State.ABORTED})

_NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.QUERYING, State.STOPPED, State.ABORTED}),
    State.QUERYING: frozenset({State.WAITING_HOST, State.MISSED, State.STOPPED, State.ABORTED}),
    State.WAITING_HOST: frozenset({State.LOADING, State.STOPPED, State.ABORTED}),
    State.LOADING: frozenset({State.LOADED, State.FAILED, State.STOPPED, State.ABORTED}),
}


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """What the owner asks for.

    Attributes:
        rid: request id; one prefetch at a time for each.
        pages: whole pages of the span.
        hashes: makes the page hashes of the span, 64 hex digits each; called once, on the query thread.
        anchor: handed to ``PrefixIndex.insert_host`` untouched.
        ns: where the pages are stored, when not in the pipeline's own namespace.
        first_blocked_at: when an earlier try for the same request was first waited for; a retry keeps its budget.
    """

    rid: Any
    pages: int
    hashes: Callable[[], Sequence[str]]
    anchor: Any = None
    ns: Namespace | None = None
    first_blocked_at: float | None = None


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """How a prefetch ended. ``outcomes`` sums to the pages queried.

    Attributes:
        state: one of the terminal states.
        reason: why, in one word for logs and labels.
        completed_pages: leading pages loaded on every rank.
        matched_pages: leading pages the host tree already had.
        hit_pages: leading pages stored on every rank.
        waited_s: seconds since the first blocked admission poll.
    """

    rid: Any
    state: State
    reason: str
    completed_pages: int
    matched_pages: int
    hit_pages: int
    outcomes: Counter[Outcome]
    waited_s: float = 0.0

    @property
    def loaded_pages(self) -> int:
        """Pages that this prefetch brought into the host tree."""
        return self.completed_pages - self.matched_pages


class HostLease:
    """The host pages of one prefetch, and who owns each of them.

    ``split`` ends the loading: [0, matched) is free now, [matched, completed) belongs to the tree,
    [completed, end) is draining until no I/O can touch it. ``take_drained`` hands the rest back, once.
    """

    def __init__(self, pages: NDArray[np.int64]) -> None:
        self.pages = pages
        self._split_at: int | None = None
        self._is_returned = False

    def __len__(self) -> int:
        return len(self.pages)

    def split(self, matched: int, completed: int) -> NDArray[np.int64]:
        """End the lease; returns the pages that are free now."""
        if self._split_at is not None:
            raise InvariantError("host lease split twice")
        if not 0 <= matched <= completed <= len(self.pages):
            raise InvariantError(f"host lease split at {matched}, {completed} of {len(self.pages)}")
        self._split_at = completed
        return self.pages[:matched]

    def take_drained(self) -> NDArray[np.int64]:
        """Return the draining pages; the caller frees them. Only after the last I/O, only once."""
        if self._split_at is None or self._is_returned:
            raise InvariantError("host pages returned twice or before the lease ended")
        self._is_returned = True
        return self.pages[self._split_at :]

    @property
    def is_returned(self) -> bool:
        """True once the last page has left the lease."""
        return self._is_returned

    @property
    def leased_pages(self) -> int:
        return len(self.pages) if self._split_at is None else 0

    @property
    def draining_pages(self) -> int:
        return 0 if self._split_at is None or self._is_returned else len(self.pages) - self._split_at


@dataclass(slots=True, eq=False)
class PrefetchOperation:
    """A prefetch under way. Pages are positions in the requested span.

    Attributes:
        seq: order of submission, equal on all ranks.
        hit_pages: leading pages stored on every rank; None until the query is back.
        completed_pages: leading pages loaded on every rank.
        outcomes: one entry per page, None while undecided.
        computed_before_s: seconds of prefill, of all requests, before ``first_blocked_at``.
        loaded_here: leading pages loaded on this rank; ``limit_here`` is how far this rank can still come.
        drains: I/O that outlived its store call.
        arrived: good pages of batches whose turn has not come, start -> end.
    """

    request: PrefetchRequest
    seq: int
    submitted_at: float
    state: State = State.QUEUED
    hashes: Sequence[str] = ()
    keys: Sequence[bytes] = ()
    hit_pages: int | None = None
    hit_here: int | None = None
    completed_pages: int = 0
    loaded_here: int = 0
    limit_here: int = 0
    lease: HostLease | None = None
    first_blocked_at: float | None = None
    computed_before_s: float = 0.0
    last_progress_at: float = 0.0
    short_of: Outcome = Outcome.NO_HOST_PAGES
    outcomes: list[Outcome | None] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)
    arrived: dict[int, int] = field(default_factory=dict)
    result: PrefetchResult | None = None

    def __post_init__(self) -> None:
        self.outcomes = [None] * self.request.pages
        self.last_progress_at = self.submitted_at
        self.first_blocked_at = self.request.first_blocked_at

    @property
    def rid(self) -> Any:
        return self.request.rid

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def usable_pages(self) -> int | None:
        """Pages that may still be loaded: the lease, the hit, or None while unknown."""
        return self.hit_pages if self.lease is None else len(self.lease)

    def move(self, state: State) -> None:
        """Take a legal transition. Raises InvariantError for any other."""
        if state not in _NEXT.get(self.state, frozenset()):
            raise InvariantError(f"prefetch {self.rid}: {self.state} -> {state}")
        self.state = state

    def take_batch(self, start: int, outcomes: Sequence[Outcome], at: float) -> None:
        """Note what a read brought on this rank. A bad page ends the prefix; what is behind it cannot count."""
        self.decide(start, outcomes)
        good = good_prefix(outcomes)
        if good < len(outcomes):
            self.limit_here = min(self.limit_here, start + good)
        if good:
            self.last_progress_at = at
            self.arrived[start] = start + good
        while self.loaded_here in self.arrived:
            self.loaded_here = self.arrived.pop(self.loaded_here)

    def decide(self, start: int, outcomes: Sequence[Outcome]) -> None:
        """Record what became of the pages from ``start`` on."""
        self.outcomes[start : start + len(outcomes)] = outcomes

    def decide_rest(self, outcome: Outcome) -> None:
        """Give every page without an outcome this one."""
        self.outcomes = [outcome if o is None else o for o in self.outcomes]

    def finish(self, state: State, reason: str, matched: int, now: float) -> PrefetchResult:
        """End the prefetch: the one terminal transition. Pages before ``completed_pages`` count as LOADED."""
        done = self.completed_pages
        self.move(state)
        self.outcomes[:done] = [Outcome.LOADED] * done
        self.outcomes[done:] = [Outcome.HOLE if o is Outcome.LOADED else o for o in self.outcomes[done:]]
        decided = [o for o in self.outcomes if o is not None]
        if len(decided) != self.request.pages:
            raise InvariantError(
                f"prefetch {self.rid}: {self.request.pages - len(decided)} pages of {self.request.pages} undecided"
            )
        waited = 0.0 if self.first_blocked_at is None else now - self.first_blocked_at
        self.result = PrefetchResult(
            self.rid, state, reason, done, matched, self.hit_pages or 0, Counter(decided), waited
        )
        return self.result
