"""When a request stops waiting for its prefetch: pure decisions over (operation view, now).

Three policies mean exactly what SGLang means by their names; one deviation is named: ``wait_complete`` has a hard
cap, so that it never hangs. ``deadline`` is ours: it waits only while fetching is expected to beat recomputing.

Ranks decide alone and are combined afterwards: one rank that says STOP stops all of them.

Source: sglang 0.5.23 srt/mem_cache/unified_radix_cache.py:2259-2313, 2390-2420.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sglang_hicache_ext.errors import ConfigError


class PolicyName(StrEnum):
    BEST_EFFORT = "best_effort"
    TIMEOUT = "timeout"
    WAIT_COMPLETE = "wait_complete"
    DEADLINE = "deadline"


class Verdict(StrEnum):
    """What an admission poll does with the request, and why it stops."""

    KEEP_WAITING = "keep_waiting"
    COMPLETE = "complete"  # everything is there, or the operation has ended already
    STOP_LATE = "stop_late"  # the wait is over; what is missing is late
    STOP_RECOMPUTE = "stop_recompute"  # recomputing the rest is cheaper than waiting for it

    @property
    def is_stop(self) -> bool:
        return self is not Verdict.KEEP_WAITING


@dataclass(slots=True)
class OperationView:
    """What a policy may know of one prefetch; built anew for every decision, so not frozen. Pages are pages of the requested span; times are Clock seconds.

    Attributes:
        requested_pages: span that was asked for.
        hit_pages: pages the store has and the host has room for; None until the hit query is back.
        completed_pages: leading pages that are loaded on every rank.
        kv_done: every KV page that will come has come.
        sidecar_done: so has every sidecar; True when there is none.
        is_terminated: the operation was ended by somebody else.
        first_blocked_at: time of the first admission poll that had to wait; None before it.
        last_progress_at: time of submission or of the last page that arrived.
        pages_ahead: pages of other requests in flight, or read before this one's rest.
        batch_pages: pages of this request in flight, or of its next batch; progress comes in this step.
        fetch_pages_per_s: measured rate of the store over all workers; 0.0 when nothing was measured yet.
        recompute_pages_per_s: prefill rate in pages; 0.0 when unknown.
        others_waiting: other requests that wait for the same server; recomputing makes each of them wait longer.
        busy_s: part of the time since ``first_blocked_at`` in which the server computed for others; waiting then
            cost nothing.
    """

    requested_pages: int
    hit_pages: int | None = None
    completed_pages: int = 0
    kv_done: bool = False
    sidecar_done: bool = True
    is_terminated: bool = False
    first_blocked_at: float | None = None
    last_progress_at: float = 0.0
    pages_ahead: int = 0
    batch_pages: int = 1
    fetch_pages_per_s: float = 0.0
    recompute_pages_per_s: float = 0.0
    others_waiting: int = 0
    busy_s: float = 0.0

    @property
    def span_pages(self) -> int:
        """Pages that may still be useful: the hit, or the requested span while the hit is unknown."""
        return self.requested_pages if self.hit_pages is None else self.hit_pages

    @property
    def is_over(self) -> bool:
        return self.is_terminated or (self.kv_done and self.sidecar_done)

    def waited_s(self, now: float) -> float:
        """Seconds since the first blocked admission poll; 0.0 before it."""
        return 0.0 if self.first_blocked_at is None else now - self.first_blocked_at


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Numbers of the policies. Refuses what cannot be meant.

    Attributes:
        page_tokens: tokens per page.
        timeout_base_s, timeout_per_ki_token_s: SGLang's ``prefetch_timeout_base`` and ``..._per_ki_token``.
        wait_complete_cap_s: hard cap of ``wait_complete``, counted from the first blocked poll.
    """

    page_tokens: int = 64
    timeout_base_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    wait_complete_cap_s: float = 60.0

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ConfigError(f"page_tokens is {self.page_tokens}", "prefetch policy", "write 1 or more")
        for name in ("timeout_base_s", "timeout_per_ki_token_s", "wait_complete_cap_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value!r}", "prefetch policy", "write seconds, 0 or more")

    def timeout_s(self, requested_pages: int) -> float:
        """Seconds ``timeout`` grants: by the span that was requested, not by the hit."""
        return self.timeout_base_s + requested_pages * (self.page_tokens / 1024 * self.timeout_per_ki_token_s)


def best_effort(op: OperationView, now: float) -> Verdict:
    """Never wait: the first admission poll ends the prefetch."""
    return Verdict.COMPLETE if op.is_over else Verdict.STOP_LATE


def timeout(settings: PolicySettings, op: OperationView, now: float) -> Verdict:
    """Wait ``timeout_s`` from the first blocked poll; a sidecar alone is never cut off."""
    if op.is_over:
        return Verdict.COMPLETE
    if op.kv_done or op.first_blocked_at is None:
        return Verdict.KEEP_WAITING
    if op.waited_s(now) > settings.timeout_s(op.requested_pages):
        return Verdict.STOP_LATE
    return Verdict.KEEP_WAITING


def wait_complete(settings: PolicySettings, op: OperationView, now: float) -> Verdict:
    """Wait for everything, at most ``wait_complete_cap_s``."""
    if op.is_over:
        return Verdict.COMPLETE
    return Verdict.STOP_LATE if op.waited_s(now) > settings.wait_complete_cap_s else Verdict.KEEP_WAITING


def deadline(settings: PolicySettings, op: OperationView, now: float) -> Verdict:
    """Wait while the pages still to come save more prefill time than they cost waiting time.

    What is loaded stays useful, so only the rest is compared. Prefill time counts once for this request and once
    for each that waits behind it. The wait of an idle server is bounded by what recomputing the whole
    span would take (plus, when others wait, what the rest would cost them). The hit query is always waited for within
    that bound. Without a known prefill rate this is ``timeout``.
    """
    if op.is_over:
        return Verdict.COMPLETE
    if op.recompute_pages_per_s <= 0:
        return timeout(settings, op, now)
    rest = op.span_pages - op.completed_pages
    left_s = recompute_s(op, op.span_pages) + op.others_waiting * recompute_s(op, max(0, rest))
    left_s -= max(0.0, op.waited_s(now) - op.busy_s)
    if left_s <= 0:
        return Verdict.STOP_RECOMPUTE
    if op.kv_done or op.hit_pages is None:
        return Verdict.KEEP_WAITING
    return Verdict.KEEP_WAITING if pages_that_pay(op, now, left_s) > 0 else Verdict.STOP_RECOMPUTE


def recompute_s(op: OperationView, pages: int) -> float:
    """Seconds the prefill needs for ``pages`` pages."""
    return pages / op.recompute_pages_per_s


def expected_fetch_s(op: OperationView, now: float, pages: int) -> float:
    """Seconds until the next ``pages`` pages of this operation are expected to have arrived.

    The measured rate, plus the part of the silence so far that the rate does not explain: a read that is overdue
    is expected to stay overdue as long again. So a stalled store never looks fast.
    """
    silence_s = max(0.0, now - op.last_progress_at)
    if op.fetch_pages_per_s <= 0:
        return silence_s
    explained_s = (op.pages_ahead + op.batch_pages) / op.fetch_pages_per_s
    return (op.pages_ahead + pages) / op.fetch_pages_per_s + max(0.0, silence_s - explained_s)


def pages_that_pay(op: OperationView, now: float, left_s: float) -> int:
    """Count the pages still to come that arrive within ``left_s`` and are cheaper to fetch than to recompute.

    Both costs are linear, so the best stopping point is either end: all pages that arrive in time, or none.
    """
    rest = op.span_pages - op.completed_pages
    if rest <= 0:
        return 0
    fixed_s = expected_fetch_s(op, now, 0)
    if op.fetch_pages_per_s > 0:
        rest = min(rest, math.floor((left_s - fixed_s) * op.fetch_pages_per_s))
    if rest <= 0:
        return 0
    saved_s = (1 + op.others_waiting) * recompute_s(op, rest)
    return rest if expected_fetch_s(op, now, rest) < saved_s else 0


def parse_policy(name: str) -> PolicyName:
    """Turn a configured text into a policy name. Raises ConfigError with the allowed names."""
    try:
        return PolicyName(name)
    except ValueError:
        allowed = ", ".join(repr(str(p)) for p in PolicyName)
        raise ConfigError(
            f"prefetch policy {name!r} does not exist", "prefetch_policy", f"write one of: {allowed}"
        ) from None


@dataclass(frozen=True, slots=True)
class Policy:
    """(operation, now) -> verdict of this rank. Pure: no clock, no state."""

    name: PolicyName
    settings: PolicySettings

    def __call__(self, op: OperationView, now: float) -> Verdict:
        return _RULES[self.name](self.settings, op, now)

    @property
    def is_clocked(self) -> bool:
        """Its verdict depends on the clock, so that ranks can differ."""
        return self.name is not PolicyName.BEST_EFFORT

    @property
    def uses_rates(self) -> bool:
        return self.name is PolicyName.DEADLINE


_RULES: dict[PolicyName, Callable[[PolicySettings, OperationView, float], Verdict]] = {
    PolicyName.BEST_EFFORT: lambda settings, op, now: best_effort(op, now),
    PolicyName.TIMEOUT: timeout,
    PolicyName.WAIT_COMPLETE: wait_complete,
    PolicyName.DEADLINE: deadline,
}


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Bind a policy to its numbers. Raises ConfigError for an unknown name."""
    return Policy(parse_policy(name), settings or PolicySettings())
