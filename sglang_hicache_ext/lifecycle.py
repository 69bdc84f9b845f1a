"""The steps of one prefetch between submission and the last freed host page. Owner thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_hicache_ext import consensus
from sglang_hicache_ext.budget import HostBudget, RetryPace
from sglang_hicache_ext.consensus import Report
from sglang_hicache_ext.errors import InvariantError
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.operation import HostLease, PrefetchOperation, PrefetchResult, State
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.pipeline_workers import BatchDone, QueryDone
from sglang_hicache_ext.policy import Verdict
from sglang_hicache_ext.ports import Clock, HostPool, PrefixIndex
from sglang_hicache_ext.rates import RateMeter
from sglang_hicache_ext.scheduling import FairPlan, LoadJob
from sglang_hicache_ext.trace import Trace


@dataclass(slots=True, eq=False)
class Slot:
    """A prefetch with its place in the agreement, until no I/O can touch its host pages."""

    op: PrefetchOperation
    pace: RetryPace
    job: LoadJob | None = None
    verdict: Verdict = Verdict.KEEP_WAITING

    @property
    def phase(self) -> int:
        """How far this rank's I/O is: see consensus.py."""
        if self.job is None:
            return consensus.DRAINED if self.op.is_terminal else consensus.RUNNING
        if self.job.in_flight or self.job.next_page < self.job.limit:
            return consensus.RUNNING
        drains = self.op.drains
        return consensus.DRAINED if not drains or all(d.is_done() for d in drains) else consensus.ARRIVED

    @property
    def is_over(self) -> bool:
        lease = self.op.lease
        return self.op.is_terminal and (lease is None or lease.is_returned)

    def report(self) -> Report:
        """This rank's view, for the agreement."""
        op = self.op
        if op.is_terminal:
            return Report(phase=self.phase)
        hit = consensus.UNKNOWN if op.hit_here is None else op.hit_here
        return Report(hit, op.loaded_here, op.limit_here, self.phase, int(not self.verdict.is_stop))


@dataclass(slots=True, eq=False)
class Lifecycle:
    """Moves prefetches on; ``on_end`` gets each result, exactly once."""

    pool: HostPool
    index: PrefixIndex
    budget: HostBudget
    plan: FairPlan
    clock: Clock
    metrics: Metrics
    on_end: Callable[[PrefetchResult], None]
    trace: Trace | None = None
    fetch_rate: RateMeter = field(default_factory=RateMeter)

    def on_query(self, done: QueryDone) -> None:
        """Note this rank's hit."""
        op = done.op
        if not op.is_terminal:
            op.hashes, op.keys, op.hit_here = done.hashes, done.keys, done.hit_pages
            op.last_progress_at = self.clock.now()
            op.decide(done.hit_pages, done.missing)

    def on_batch(self, done: BatchDone) -> None:
        """Note what a read brought on this rank, also for a prefetch that has ended."""
        batch, result = done.batch, done.result
        op: PrefetchOperation = batch.job.tag
        outcomes = [Outcome.READ_ERROR] * batch.pages
        if result is not None:
            if result.drain is not None:
                op.drains.append(result.drain)
            if len(result.outcomes) == batch.pages:
                outcomes = list(result.outcomes)
        self.plan.settle(batch)
        self.fetch_rate.record(outcomes.count(Outcome.LOADED), done.started_at, done.ended_at)
        if not op.is_terminal:
            op.take_batch(batch.start, outcomes, done.ended_at)
            self.plan.cut(batch.job, op.limit_here)

    def take_hit(self, slot: Slot, hit: int) -> None:
        """All ranks have answered: ``hit`` leading pages are stored on every one."""
        op = slot.op
        op.hit_pages = hit
        op.decide(hit, [Outcome.HOLE] * ((op.hit_here or 0) - hit))
        if hit < self.budget.settings.threshold_pages:
            op.decide_rest(Outcome.BELOW_THRESHOLD)
            self._finish(op, State.MISSED, "below_threshold" if hit else "miss")
        else:
            op.move(State.WAITING_HOST)

    def try_load(self, slot: Slot, pump: int) -> bool:
        """Lease host pages and plan the reads. False: it did not fit and stays the head of the line."""
        op, hit = slot.op, slot.op.hit_pages or 0
        if not slot.pace.is_due(self.budget.signature, pump):
            return False
        grant = self.budget.grant(hit, op.submitted_at)
        op.short_of = grant.short_of
        if grant.pages is None:
            return False
        op.move(State.LOADING)
        op.lease = HostLease(grant.pages)
        op.limit_here = len(op.lease)
        op.last_progress_at = self.clock.now()
        op.decide(len(op.lease), [grant.short_of] * (hit - len(op.lease)))
        slot.job = LoadJob(op, op.seq, op.keys, self.pool.regions(grant.pages), len(op.lease))
        self.plan.add(slot.job)
        return True

    def advance(self, slot: Slot, agreed: Report) -> None:
        """Publish the progress that all ranks have, and end the prefetch when no more can come."""
        op = slot.op
        if slot.job is None or op.lease is None:
            raise InvariantError(f"prefetch {op.rid} is loading without a lease")
        op.completed_pages = agreed.loaded
        op.limit_here = min(op.limit_here, agreed.limit)
        self.plan.cut(slot.job, op.limit_here)
        if agreed.phase >= consensus.ARRIVED:
            state = State.LOADED if op.completed_pages == len(op.lease) else State.FAILED
            self._end_loading(slot, state, str(state), Outcome.HOLE)

    def stop(self, slot: Slot, verdict: Verdict) -> None:
        """A poll ends it: what is complete is inserted."""
        op = slot.op
        rest = Outcome.POLICY_STOP if verdict is Verdict.STOP_RECOMPUTE else Outcome.LATE
        if op.state is State.LOADING:
            self._end_loading(slot, State.STOPPED, str(verdict), rest)
            return
        waits_for = {State.WAITING_HOST: op.short_of, State.QUEUED: Outcome.RATE_LIMITED}
        op.decide_rest(waits_for.get(op.state, rest))
        self._finish(op, State.STOPPED, str(verdict))

    def abort(self, slot: Slot, reason: str = "aborted") -> None:
        """The request went away: nothing is inserted, all its host pages drain."""
        op = slot.op
        if slot.job is not None:
            self.plan.cut(slot.job, 0)
        if op.lease is not None:
            op.lease.split(0, 0)
        op.completed_pages = 0
        hit = op.request.pages if op.hit_pages is None else op.hit_pages
        op.outcomes[:hit] = [Outcome.ABORTED] * hit
        self._finish(op, State.ABORTED, reason)

    def release(self, slot: Slot) -> None:
        """No I/O can touch the pages of an ended prefetch any more: free them, once."""
        lease = slot.op.lease
        if lease is not None and not lease.is_returned:
            self.budget.free(lease.take_drained())

    def _end_loading(self, slot: Slot, state: State, reason: str, rest: Outcome) -> None:
        op, lease, done, matched = slot.op, slot.op.lease, slot.op.completed_pages, 0
        if lease is None or slot.job is None:
            raise InvariantError(f"prefetch {op.rid} ends loading without a lease")
        self.plan.cut(slot.job, 0)
        started = self.clock.now()
        if done:
            matched = self.index.insert_host(op.request.anchor, lease.pages[:done], op.hashes[:done])
        self.budget.free(lease.split(matched, done))
        self.budget.hand_over(done - matched)
        if self.trace is not None:
            self.trace.span("insert", str(op.rid), started, self.clock.now(), pages=done, matched=matched)
        op.decide_rest(rest)
        self._finish(op, state, reason, matched)

    def _finish(self, op: PrefetchOperation, state: State, reason: str, matched: int = 0) -> None:
        result = op.finish(state, reason, matched, self.clock.now())
        self.metrics.add(f"prefetch_{state}")
        self.metrics.observe("prefetch_wait", result.waited_s)
        self.metrics.pages(o for o in op.outcomes if o is not None)
        self.on_end(result)

    def decline(self, pages: int, reason: Outcome) -> Outcome:
        """Count a prefetch that was not accepted."""
        self.metrics.add("prefetch_declined")
        self.metrics.pages([reason] * pages)
        return reason
