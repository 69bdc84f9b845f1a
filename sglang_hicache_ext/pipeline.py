"""The prefetch pipeline: hit query -> reads -> host tree, for many requests at once.

One owner thread calls ``submit``, ``pump``, ``poll``, ``abort`` and ``close`` and alone changes state. A query worker
and several I/O workers run beside it. ``pump`` is called often, on every rank, in the same order as the other calls;
it makes the pipeline's only collective (consensus.py).
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext import consensus
from sglang_hicache_ext.budget import HostBudget, RetryPace
from sglang_hicache_ext.consensus import Agreement
from sglang_hicache_ext.errors import InvariantError
from sglang_hicache_ext.executor import Executor, ThreadExecutor
from sglang_hicache_ext.lifecycle import Lifecycle, Slot
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.operation import PrefetchOperation, PrefetchRequest, PrefetchResult, State
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.pipeline_settings import PipelineSettings
from sglang_hicache_ext.pipeline_workers import Inbox, InFlight, QueryDone, Workshop
from sglang_hicache_ext.policy import OperationView, Policy, Verdict
from sglang_hicache_ext.ports import (
    Clock,
    Drain,
    HostPool,
    Namespace,
    NoRankSync,
    PageStore,
    PrefixIndex,
    RankSync,
    SystemClock,
)
from sglang_hicache_ext.rates import RateMeter
from sglang_hicache_ext.scheduling import FairPlan
from sglang_hicache_ext.trace import Trace

_log = logging.getLogger(__name__)

_RESULTS_KEPT = 4096
_ORDINAL = {state: i for i, state in enumerate(State)}


@dataclass(frozen=True, slots=True)
class Poll:
    """Answer to an admission poll. ``result`` is None while waiting and for a request without a prefetch."""

    is_ready: bool
    result: PrefetchResult | None = None


@dataclass(frozen=True, slots=True)
class SlotDrain:
    """Drain of the pages of one prefetch that outlived its pipeline. Owner thread."""

    pipeline: Pipeline
    slot: Slot

    def is_done(self) -> bool:
        self.pipeline._take_events()
        return self.slot.phase == consensus.DRAINED

    def wait(self, timeout_s: float) -> bool:
        return self.is_done()


class Pipeline:
    """Prefetches of one rank. See the module for threads; every wait is bounded.

    Args:
        store, ns: where pages come from; called from the workers.
        pool, index: host pages and host tree; called from the owner.
        policy: see ``policy.make_policy``.
        sync: the ranks; a group of one by default.
    """

    def __init__(
        self,
        store: PageStore,
        ns: Namespace,
        pool: HostPool,
        index: PrefixIndex,
        policy: Policy,
        settings: PipelineSettings | None = None,
        *,
        sync: RankSync | None = None,
        clock: Clock | None = None,
        executor: Executor | None = None,
        metrics: Metrics | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.settings = settings or PipelineSettings()
        self.metrics = metrics or Metrics()
        self.prefill_rate = RateMeter()
        self.budget = HostBudget(self.settings.budget, pool)
        self._policy = policy
        self._sync: RankSync = sync or NoRankSync()
        self._clock: Clock = clock or SystemClock()
        self._executor: Executor = executor or ThreadExecutor()
        self._plan = FairPlan(self.settings.batches)
        self._life = Lifecycle(
            pool, index, self.budget, self._plan, self._clock, self.metrics, self._on_end, trace
        )  # fmt: skip
        self._queue: deque[Slot] = deque()
        self._slots: list[Slot] = []
        self._active: dict[Any, Slot] = {}
        self._results: OrderedDict[Any, PrefetchResult] = OrderedDict()
        self._submitted = self._pumps = 0
        self._had_slots = False
        self._is_sound = self._is_healthy = self._is_enabled = True
        self._shop = Workshop(
            store, ns, self._plan, Inbox(), InFlight(), self._executor, self._clock, deque(),
            self.settings.hold_s, self.settings.read_deadline_s, trace,
        )  # fmt: skip
        self._start_workers()

    def _start_workers(self) -> None:
        self._executor.add("hicache-query", self._shop.query_body)
        for i in range(self.settings.io_workers):
            name = f"hicache-io-{i}"
            self._executor.add(name, lambda name=name: self._shop.io_body(name))  # type: ignore[misc]

    # -- the owner's calls ------------------------------------------------------------------------------------------

    def submit(self, request: PrefetchRequest) -> Outcome | None:
        """Accept a prefetch (None) or decline it (why). Allocates no host page and never blocks."""
        if request.rid in self._active:
            raise InvariantError(f"prefetch {request.rid} is already under way")
        self.metrics.add("prefetch_submitted")
        reason = self._why_decline(request)
        if reason is not None:
            return self._life.decline(request.pages, reason)
        op = PrefetchOperation(request, self._submitted, self._clock.now())
        self._submitted += 1
        self._results.pop(request.rid, None)
        self._active[request.rid] = slot = Slot(op, RetryPace(self.settings.budget.retry_pumps))
        self._queue.append(slot)
        self._fill_slots()
        return None

    def pump(self) -> None:
        """Take in what the workers did, agree with the other ranks, move every prefetch on. Makes no I/O."""
        steps = self.pump_steps()
        try:
            steps.send(self._sync.min_many(next(steps)))
        except StopIteration:
            return

    def poll(self, rid: Any) -> Poll:
        """Ask at admission whether ``rid`` may start. A ready answer ends its prefetch and hands out its result once.

        Clocked policies are judged in ``pump``, so that all ranks give the same answer.
        """
        slot = self._active.get(rid)
        if slot is None:
            return Poll(True, self._results.pop(rid, None))
        verdict = self._verdict(slot)
        if not verdict.is_stop:
            if slot.op.first_blocked_at is None:
                slot.op.first_blocked_at = self._clock.now()
                slot.op.computed_before_s = self.prefill_rate.total_s
            return Poll(False)
        self._guarded(self._life.stop, slot, verdict)
        return Poll(True, self._results.pop(rid, None))

    def abort(self, rid: Any) -> bool:
        """The request went away: nothing is inserted, host pages drain. False when there was no prefetch."""
        self._results.pop(rid, None)
        slot = self._active.get(rid)
        if slot is None:
            return False
        self._guarded(self._life.abort, slot)
        self._results.pop(rid, None)
        return True

    def has(self, rid: Any) -> bool:
        """True while ``rid`` has a prefetch under way."""
        return rid in self._active

    def observe_prefill(self, tokens: int, started_at: float, ended_at: float) -> None:
        """Feed the measured prefill rate; times by the Clock."""
        self.prefill_rate.record(tokens, started_at, ended_at)

    @property
    def is_idle(self) -> bool:
        """True when no prefetch is under way and no host page is draining."""
        return not self._active and not self._slots

    @property
    def is_enabled(self) -> bool:
        """False after ``close`` and after a bug of ours: every prefetch is declined."""
        return self._is_enabled

    @property
    def draining_pages(self) -> int:
        return sum(s.op.lease.draining_pages for s in self._slots if s.op.lease is not None)

    def health(self) -> dict[str, Any]:
        """What an operator asks first; JSON-ready. Owner thread."""
        seconds, what = self._shop.in_flight.oldest(self._clock.now())
        return {
            "is_enabled": self._is_enabled,
            "is_degraded": not self._is_healthy,
            "oldest_inflight_seconds": seconds,
            "oldest_inflight": what,
            "under_way": len(self._active),
            "held_pages": self.budget.held_pages,
            "draining_pages": self.draining_pages,
            "fetch_pages_per_s": self._life.fetch_rate.per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
        }

    def close(self, timeout_s: float = 10.0) -> list[str]:
        """End everything within ``timeout_s``; idempotent. Returns the calls that are still stuck.

        Host pages that a stuck call may still write to are not given back.
        """
        for slot in list(self._active.values()):
            self._guarded(self._life.abort, slot)
        self._is_enabled = False
        names = self._executor.stop(timeout_s)
        self._take_events()
        for slot in self._slots:
            if slot.phase == consensus.DRAINED:
                self._life.release(slot)
        self._slots = [s for s in self._slots if not s.is_over]
        stuck = self._shop.in_flight.names()
        return [f"{name}: {stuck.get(name, 'ending')}" for name in names]

    def withheld(self) -> list[tuple[NDArray[np.int64], Drain]]:
        """Host pages that ``close`` did not give back, each with what tells when they are safe. Owner thread."""
        leases = [(s, s.op.lease) for s in self._slots if s.op.lease is not None and not s.op.lease.is_returned]
        return [
            (lease.pages[-lease.draining_pages :], SlotDrain(self, s)) for s, lease in leases if lease.draining_pages
        ]

    # -- pump -------------------------------------------------------------------------------------------------------

    def pump_steps(self) -> Generator[NDArray[np.int64], NDArray[np.int64], None]:
        """One pump as a coroutine: yields this rank's vector, is sent the minimum over the ranks.

        A pump without prefetches makes no collective, except once after the last one ended, so that a rank on
        which something broke can still say so.
        """
        self._pumps += 1
        if not self._is_enabled:
            return
        self._guarded(self._take_events)
        must_agree = bool(self._slots) or self._had_slots or not self._is_healthy
        self._had_slots = bool(self._slots)
        if not must_agree:
            return
        order = list(self._slots)
        agreement = consensus.decode((yield self._vector(order)), len(order))
        if not agreement.is_sound:
            self._disable()
            return
        self._is_healthy = agreement.is_healthy
        self._guarded(self._apply, order, agreement)
        self._fill_slots()

    def _take_events(self) -> None:
        was_full = self._shop.inbox.is_full
        for event in self._shop.inbox.drain():
            if isinstance(event, QueryDone):
                self._life.on_query(event)
            else:
                self._life.on_batch(event)
        if was_full:
            self._executor.wake()

    def _vector(self, order: list[Slot]) -> NDArray[np.int64]:
        now = self._clock.now()
        oldest, what = self._shop.in_flight.oldest(now)
        is_healthy = oldest <= self.settings.stall_limit_s
        if self._is_healthy and not is_healthy:
            _log.error("the store is stuck: %s has run for %.1f s; requests recompute until it returns", what, oldest)
        self.metrics.set("oldest_inflight_seconds", oldest)
        for slot in order if self._policy.is_clocked else ():
            if slot.op.first_blocked_at is not None or self._policy.uses_rates:
                slot.verdict = self._policy(self._view(slot, now), now)
        stamp = consensus.stamp_of([x for s in order for x in (s.op.seq, _ORDINAL[s.op.state])])
        return consensus.encode(
            self.settings.slots, [s.report() for s in order], stamp, self._is_sound, is_healthy
        )  # fmt: skip

    def _apply(self, order: list[Slot], agreement: Agreement) -> None:
        is_line_blocked = False
        for slot, agreed in zip(order, agreement.reports, strict=True):
            op = slot.op
            if not agreed.keep_waiting and not slot.verdict.is_stop:
                slot.verdict = Verdict.STOP_LATE
            if op.state is State.QUERYING and agreed.hit != consensus.UNKNOWN:
                self._life.take_hit(slot, agreed.hit)
            if op.state is State.WAITING_HOST and not is_line_blocked:
                is_line_blocked = not self._life.try_load(slot, self._pumps)
                self._executor.wake()
            elif op.state is State.LOADING:
                self._life.advance(slot, agreed)
            if op.is_terminal and agreed.phase == consensus.DRAINED:
                self._life.release(slot)
        self._slots = [s for s in self._slots if not s.is_over]

    def _fill_slots(self) -> None:
        while self._queue and len(self._slots) < self.settings.slots:
            slot = self._queue.popleft()
            if slot.op.is_terminal:
                continue
            slot.op.move(State.QUERYING)
            self._slots.append(slot)
            self._shop.queries.append(slot.op)
            self._executor.wake()

    # -- decisions --------------------------------------------------------------------------------------------------

    def _verdict(self, slot: Slot) -> Verdict:
        """The same on all ranks. A prefetch without a slot takes no part in the agreement: nobody waits for it."""
        if not self._is_healthy or not self._policy.is_clocked or slot.op.state is State.QUEUED:
            return Verdict.STOP_LATE
        return slot.verdict

    def _view(self, slot: Slot, now: float) -> OperationView:
        op = slot.op
        job = slot.job if self._policy.uses_rates else None
        return OperationView(
            requested_pages=op.request.pages,
            hit_pages=op.usable_pages,
            completed_pages=op.completed_pages,
            is_terminated=op.is_terminal,
            first_blocked_at=op.first_blocked_at,
            last_progress_at=op.last_progress_at,
            pages_ahead=0 if job is None else self._plan.pages_ahead(job),
            batch_pages=1 if job is None else self._plan.pages_due(job, op.completed_pages),
            fetch_pages_per_s=self._life.fetch_rate.per_s,
            recompute_pages_per_s=self.prefill_tokens_per_s / self.settings.budget.page_tokens,
            others_waiting=len(self._active) - 1,
            busy_s=0.0 if op.first_blocked_at is None else self.prefill_rate.total_s - op.computed_before_s,
        )

    @property
    def prefill_tokens_per_s(self) -> float:
        """Configured or measured; 0.0 while unknown."""
        return self.settings.prefill_tokens_per_s or self.prefill_rate.per_s

    def _why_decline(self, request: PrefetchRequest) -> Outcome | None:
        if request.pages < self.settings.budget.threshold_pages:
            return Outcome.BELOW_THRESHOLD
        if not self._is_enabled:
            return Outcome.READ_ERROR
        if not self._is_healthy:
            return Outcome.LATE
        room = self.settings.queue + self.settings.slots - len(self._slots)
        return Outcome.RATE_LIMITED if len(self._queue) >= room else None

    def _on_end(self, result: PrefetchResult) -> None:
        self._active.pop(result.rid, None)
        self._results[result.rid] = result
        if len(self._results) > _RESULTS_KEPT:
            self._results.popitem(last=False)

    # -- trouble ----------------------------------------------------------------------------------------------------

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step; a bug in it turns the pipeline off on every rank at the next pump, and serving goes on."""
        try:
            step(*args)
        except Exception:
            self._is_sound = False
            _log.exception("the prefetch pipeline met a bug and turns itself off; requests recompute")

    def _disable(self) -> None:
        """End every prefetch without touching host memory: nobody knows any more who owns it."""
        self._is_enabled = False
        _log.error("the prefetch pipeline is off on all ranks; host pages it held stay withheld")
        for slot in list(self._active.values()):
            self._guarded(self._life.abort, slot, "disabled")
        self._active.clear()
        self._queue.clear()
