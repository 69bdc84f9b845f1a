"""The policies: the whole table, SGLang's clocks, and what deadline promises."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.policy import OperationView, PolicyName, PolicySettings, Verdict, make_policy, parse_policy

NUMBERS = PolicySettings(page_tokens=64, timeout_base_s=1.0, timeout_per_ki_token_s=0.25, wait_complete_cap_s=60.0)
T0 = 500.0
LONG_AGO = -1000.0

BLOCKED = OperationView(
    requested_pages=160,
    hit_pages=100,
    completed_pages=50,
    first_blocked_at=T0,
    last_progress_at=T0,
    fetch_pages_per_s=1000.0,
    recompute_pages_per_s=10.0,
)


def expected(policy: PolicyName, kv: bool, sidecar: bool, expired: bool, terminated: bool) -> Verdict:
    if terminated or (kv and sidecar):
        return Verdict.COMPLETE
    if policy is PolicyName.BEST_EFFORT:
        return Verdict.STOP_LATE
    if policy is PolicyName.TIMEOUT:
        return Verdict.STOP_LATE if expired and not kv else Verdict.KEEP_WAITING
    late = Verdict.STOP_RECOMPUTE if policy is PolicyName.DEADLINE else Verdict.STOP_LATE
    return late if expired else Verdict.KEEP_WAITING


@pytest.mark.parametrize(
    ("policy", "kv", "sidecar", "expired", "terminated"),
    list(itertools.product(PolicyName, *[[False, True]] * 4)),
)
def test_every_case_of_the_policy_table(
    policy: PolicyName, kv: bool, sidecar: bool, expired: bool, terminated: bool
) -> None:
    op = replace(BLOCKED, kv_done=kv, sidecar_done=sidecar, is_terminated=terminated)
    now = T0 + (100.0 if expired else 0.01)
    assert make_policy(policy, NUMBERS)(op, now) is expected(policy, kv, sidecar, expired, terminated)


def test_timeout_counts_the_requested_span_from_the_first_blocked_poll() -> None:
    rule = make_policy("timeout", NUMBERS)
    limit = 1.0 + 160 * 64 / 1024 * 0.25
    assert NUMBERS.timeout_s(160) == pytest.approx(limit)
    assert rule(BLOCKED, T0 + limit - 1e-6) is Verdict.KEEP_WAITING
    assert rule(BLOCKED, T0 + limit + 1e-6) is Verdict.STOP_LATE
    never_polled = replace(BLOCKED, first_blocked_at=None, last_progress_at=LONG_AGO)
    assert rule(never_polled, T0 + 1e6) is Verdict.KEEP_WAITING


def test_wait_complete_ends_at_its_cap_and_not_before() -> None:
    rule = make_policy("wait_complete", NUMBERS)
    assert rule(BLOCKED, T0 + 59.9) is Verdict.KEEP_WAITING
    assert rule(BLOCKED, T0 + 60.1) is Verdict.STOP_LATE


def test_nothing_of_nothing_is_not_complete() -> None:
    unqueried = OperationView(requested_pages=8, first_blocked_at=T0)
    assert make_policy("wait_complete", NUMBERS)(unqueried, T0 + 1) is Verdict.KEEP_WAITING


def test_deadline_waits_for_a_store_that_is_faster_than_the_model() -> None:
    assert make_policy("deadline", NUMBERS)(BLOCKED, T0) is Verdict.KEEP_WAITING


def test_deadline_stops_at_once_when_recomputing_is_cheaper() -> None:
    slow = replace(BLOCKED, fetch_pages_per_s=5.0)
    assert make_policy("deadline", NUMBERS)(slow, T0) is Verdict.STOP_RECOMPUTE


def test_deadline_counts_the_queue_ahead() -> None:
    rule = make_policy("deadline", NUMBERS)
    assert rule(replace(BLOCKED, pages_ahead=4_000), T0) is Verdict.KEEP_WAITING
    assert rule(replace(BLOCKED, pages_ahead=6_000), T0) is Verdict.STOP_RECOMPUTE


def test_deadline_does_not_trust_the_rate_of_a_store_that_stalls() -> None:
    rule = make_policy("deadline", NUMBERS)
    assert rule(BLOCKED, T0 + 4.9) is Verdict.KEEP_WAITING
    assert rule(BLOCKED, T0 + 5.1) is Verdict.STOP_RECOMPUTE


def test_deadline_without_a_prefill_rate_is_timeout() -> None:
    unknown = replace(BLOCKED, recompute_pages_per_s=0.0)
    rule = make_policy("deadline", NUMBERS)
    assert rule(unknown, T0 + 3.4) is Verdict.KEEP_WAITING
    assert rule(unknown, T0 + 3.6) is Verdict.STOP_LATE


views = st.builds(
    OperationView,
    requested_pages=st.integers(1, 5000),
    hit_pages=st.none() | st.integers(1, 5000),
    completed_pages=st.integers(0, 100),
    kv_done=st.booleans(),
    sidecar_done=st.booleans(),
    first_blocked_at=st.just(T0),
    last_progress_at=st.floats(T0 - 10, T0),
    pages_ahead=st.integers(0, 10_000),
    batch_pages=st.integers(1, 128),
    fetch_pages_per_s=st.just(0.0) | st.floats(0.1, 1e5),
    recompute_pages_per_s=st.floats(0.1, 1e5),
)


@given(views, st.floats(0, 1e4))
@settings(max_examples=300, deadline=None)
def test_deadline_never_waits_longer_than_recomputing_everything_takes(op: OperationView, waited: float) -> None:
    total_s = op.span_pages / op.recompute_pages_per_s
    if waited > total_s:
        assert make_policy("deadline", NUMBERS)(op, T0 + waited).is_stop


@given(views, st.floats(0, 100), st.floats(0, 100), st.sampled_from(["timeout", "wait_complete"]))
@settings(max_examples=300, deadline=None)
def test_a_wait_that_was_over_does_not_begin_again(op: OperationView, a: float, b: float, name: str) -> None:
    rule = make_policy(name, NUMBERS)
    if rule(op, T0 + min(a, b)).is_stop:
        assert rule(op, T0 + max(a, b)).is_stop


def test_a_policy_that_does_not_exist_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="'best_effort', 'timeout', 'wait_complete', 'deadline'"):
        parse_policy("eager")


@pytest.mark.parametrize("field", ["timeout_base_s", "timeout_per_ki_token_s", "wait_complete_cap_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_meant_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(NUMBERS, **{field: value})
