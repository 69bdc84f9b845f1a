"""What the simulation taught ``deadline``: who waits behind, busy servers, hit queries, and outliers of the rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_hicache_ext.policy import OperationView, PolicySettings, Verdict, make_policy
from sglang_hicache_ext.rates import RateMeter

RULE = make_policy("deadline", PolicySettings())
VIEW = OperationView(
    requested_pages=100,
    hit_pages=100,
    first_blocked_at=0.0,
    fetch_pages_per_s=100.0,
    recompute_pages_per_s=50.0,
    batch_pages=100,
)


def test_recomputing_counts_for_everyone_who_waits() -> None:
    slower = replace(VIEW, fetch_pages_per_s=25.0)  # 4 s to fetch, 2 s to recompute
    assert RULE(slower, 0.0) is Verdict.STOP_RECOMPUTE
    assert RULE(replace(slower, others_waiting=2), 0.0) is Verdict.KEEP_WAITING


def test_time_in_which_the_server_was_busy_is_not_waiting() -> None:
    steady = replace(VIEW, completed_pages=60, last_progress_at=9.9)
    assert RULE(steady, 10.0) is Verdict.STOP_RECOMPUTE
    assert RULE(replace(steady, busy_s=9.5), 10.0) is Verdict.KEEP_WAITING


def test_the_hit_query_is_waited_for_within_the_bound() -> None:
    unknown = replace(VIEW, hit_pages=None, fetch_pages_per_s=1.0)
    assert RULE(unknown, 0.5) is Verdict.KEEP_WAITING
    assert RULE(unknown, 2.1) is Verdict.STOP_RECOMPUTE


def test_a_free_server_with_nobody_else_waits_no_longer_than_recomputing() -> None:
    steady = replace(VIEW, completed_pages=60, last_progress_at=2.0)
    assert RULE(steady, 2.01) is Verdict.STOP_RECOMPUTE


def test_one_stall_hardly_moves_the_rate_and_a_lasting_change_does() -> None:
    meter, now = RateMeter(), 0.0
    for _ in range(30):
        meter.record(10, now, now + 0.1)
        now += 0.1
    meter.record(10, now, now + 60.0)
    now += 60.0
    assert meter.per_s == pytest.approx(100.0, rel=0.15)
    for _ in range(60):
        meter.record(10, now, now + 0.5)
        now += 0.5
    assert meter.per_s == pytest.approx(20.0, rel=0.3)
    assert meter.total_s == pytest.approx(93.0)
