"""Metrics: one outcome per page, sums that add up, snapshots that do not move."""

from __future__ import annotations

import threading

from sglang_hicache_ext.errors import ConfigError, StoreError
from sglang_hicache_ext.metrics import Histogram, Metrics
from sglang_hicache_ext.outcome import Outcome, WriteOutcome, good_prefix, tally


def test_the_sum_of_outcomes_is_the_number_of_pages() -> None:
    m = Metrics()
    m.pages([Outcome.LOADED] * 5 + [Outcome.CORRUPT, Outcome.HOLE])
    m.pages([])
    snap = m.snapshot()
    assert snap.pages_queried == 7
    assert snap.outcomes == {"loaded": 5, "corrupt": 1, "hole": 1}


def test_a_snapshot_does_not_move() -> None:
    m = Metrics()
    m.observe("read", 0.003)
    before = m.snapshot()
    m.observe("read", 0.003)
    m.add("bytes", 10)
    assert before.histograms["read"].count == 1
    assert before.counters == {}


def test_updates_from_many_threads_are_not_lost() -> None:
    m = Metrics()
    threads = [threading.Thread(target=lambda: [m.add("n") for _ in range(2000)]) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert m.snapshot().counters["n"] == 16000


def test_the_histogram_counts_a_value_on_its_bound_below_it() -> None:
    h = Histogram((1.0, 2.0))
    for v in (0.5, 1.0, 1.5, 9.0):
        h.observe(v)
    assert h.counts == [2, 1, 1]
    assert h.total == 12.0


def test_the_good_prefix_ends_at_the_first_page_that_is_not_loaded() -> None:
    assert good_prefix([]) == 0
    assert good_prefix([Outcome.LOADED, Outcome.LOADED, Outcome.ABSENT, Outcome.LOADED]) == 2
    assert tally([Outcome.LATE, Outcome.LATE]) == {Outcome.LATE: 2}
    assert [o for o in WriteOutcome if o.is_stored] == [WriteOutcome.STORED, WriteOutcome.PRESENT]


def test_errors_say_what_where_and_what_to_do() -> None:
    assert str(ConfigError("a is 1", "here", "write 2")) == "a is 1 (in here) -> write 2"
    text = str(StoreError("read", "device said no", key="ab", path="/d", errno=5, is_transient=True))
    assert "errno=5" in text and "transient" in text and "key=ab" in text
