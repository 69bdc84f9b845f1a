"""The fair order, the agreement of ranks, budgets, rates and the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.budget import BudgetSettings, HostBudget, RetryPace
from sglang_hicache_ext.consensus import Report, decode, encode, stamp_of
from sglang_hicache_ext.errors import ConfigError, InvariantError
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.pipeline_settings import PipelineSettings
from sglang_hicache_ext.rates import RateMeter
from sglang_hicache_ext.scheduling import BatchSizes, FairPlan, LoadJob
from sglang_hicache_ext.testing.fakes import FakeHostPool
from sglang_hicache_ext.trace import Trace


def job(seq: int, pages: int) -> LoadJob:
    return LoadJob(seq, seq, (), Regions(np.zeros((pages, 1), np.uint64), np.ones(1, np.int64)), pages)


def taken(plan: FairPlan) -> list[tuple[int, int, int]]:
    out = []
    while (batch := plan.take()) is not None:
        out.append((batch.job.seq, batch.start, batch.stop))
    return out


def test_a_small_request_is_not_stuck_behind_a_large_one() -> None:
    plan = FairPlan(BatchSizes(16, 128))
    plan.add(job(0, 10_000))
    for _ in range(20):
        plan.take()  # the large one has been read for a while
    for seq in range(1, 21):
        plan.add(job(seq, 100))
    order = taken(plan)
    pages_before = {}
    total = 0
    for seq, start, stop in order:
        total += stop - start
        pages_before[seq] = total
    assert sorted(pages_before[s] for s in range(1, 21))[10] < 0.25 * 10_000
    assert pages_before[0] == total


def test_every_page_is_read_once_and_in_order_within_a_request() -> None:
    plan = FairPlan(BatchSizes(3, 8))
    for seq, pages in enumerate((50, 1, 17)):
        plan.add(job(seq, pages))
    order = taken(plan)
    for seq, pages in enumerate((50, 1, 17)):
        ranges = [(start, stop) for s, start, stop in order if s == seq]
        assert [p for start, stop in ranges for p in range(start, stop)] == list(range(pages))


def test_a_late_request_does_not_starve_an_old_one() -> None:
    plan = FairPlan(BatchSizes(8, 8))
    plan.add(old := job(0, 400))
    for _ in range(20):
        plan.take()
    for seq in range(1, 5):
        plan.add(job(seq, 400))
    first = [plan.take() for _ in range(25)]
    assert sum(b.job is old for b in first if b is not None) >= 4


def test_a_cut_job_is_read_no_further() -> None:
    plan = FairPlan(BatchSizes(4, 4))
    plan.add(cut := job(0, 40))
    plan.take()
    plan.cut(cut, 6)
    assert taken(plan) == [(0, 4, 6)]
    assert cut.in_flight == 2


def test_pages_ahead_follow_the_fair_order() -> None:
    plan = FairPlan(BatchSizes(16, 128))
    plan.add(large := job(0, 1000))
    plan.add(small := job(1, 10))
    assert plan.pages_ahead(small) == 10
    assert plan.pages_ahead(large) == 10


def test_the_vector_has_one_length_and_names_unequal_ranks() -> None:
    reports = [Report(5, 4, 3, 1, 1), Report(-1, 0, 0, 0, 0)]
    one = encode(8, reports, stamp_of([0, 1]), True, True)
    two = encode(8, [], stamp_of([0, 2]), True, True)
    assert len(one) == len(two)
    agreed = decode(one, 2)
    assert (agreed.is_sound, agreed.reports) == (True, tuple(reports))
    assert not decode(np.minimum(one, two), 2).is_sound
    assert not decode(np.minimum(one, encode(8, reports, stamp_of([0, 1]), False, True)), 2).is_sound
    assert not decode(np.minimum(one, encode(8, reports, stamp_of([0, 1]), True, False)), 2).is_healthy


def test_a_budget_hands_out_its_share_and_takes_it_back_once() -> None:
    pool = FakeHostPool(20)
    budget = HostBudget(BudgetSettings(page_tokens=1, threshold_tokens=4, host_share=0.5), pool)
    first = budget.grant(8, 0.0)
    assert first.pages is not None and len(first.pages) == 8
    short = budget.grant(8, 0.0)
    assert (short.pages, short.short_of) == (None, Outcome.RATE_LIMITED)
    budget.free(first.pages)
    shrunk = budget.grant(15, 0.0)
    assert shrunk.pages is not None and (len(shrunk.pages), shrunk.short_of) == (10, Outcome.RATE_LIMITED)
    budget.hand_over(10)
    with pytest.raises(InvariantError):
        budget.hand_over(1)


def test_a_hit_shorter_than_the_threshold_in_tokens_still_fits_whole_pages() -> None:
    assert BudgetSettings(page_tokens=64, threshold_tokens=256).threshold_pages == 4
    assert BudgetSettings(page_tokens=64, threshold_tokens=65).threshold_pages == 2


def test_retries_come_when_pages_were_freed_or_after_a_pause() -> None:
    pace = RetryPace(8)
    assert pace.is_due((0, 0), 1)
    assert not pace.is_due((0, 0), 2)
    assert pace.is_due((5, 0), 3)
    assert not pace.is_due((5, 0), 10)
    assert pace.is_due((5, 0), 11)


def test_a_rate_counts_overlapping_work_once_and_falls_when_work_brings_nothing() -> None:
    meter = RateMeter()
    assert meter.per_s == 0.0
    meter.record(100, 0.0, 1.0)
    meter.record(100, 0.0, 1.0)
    assert meter.per_s == pytest.approx(200.0)
    meter.record(0, 1.0, 11.0)
    assert meter.per_s < 20.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: BudgetSettings(page_tokens=64, threshold_tokens=63),
        lambda: BudgetSettings(host_share=0.0),
        lambda: BudgetSettings(retry_pumps=0),
        lambda: BudgetSettings(page_tokens=0),
        lambda: BatchSizes(0, 4),
        lambda: BatchSizes(8, 4),
        lambda: PipelineSettings(io_workers=0),
        lambda: PipelineSettings(read_deadline_s=0.0),
        lambda: PipelineSettings(hold_s=-1.0),
        lambda: PipelineSettings(prefill_tokens_per_s=-1.0),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="write"):
        make()


def test_a_trace_is_what_chrome_opens(tmp_path: Path) -> None:
    trace = Trace(most=2)
    for i in range(3):
        trace.span("io", f"r{i}", i, i + 0.5, pages=i)
    trace.write(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [s["args"]["pages"] for s in spans] == [1, 2]
    assert spans[0]["ts"] == 1e6 and spans[0]["dur"] == 5e5
    assert {e["tid"] for e in spans} == {e["tid"] for e in events if e["ph"] == "M"}
