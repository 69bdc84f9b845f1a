from __future__ import annotations

import pytest

from sglang_hicache_ext.storage_backends.remote.breaker import (
    Breaker,
    BreakerState,
    NegativeCache,
    PeerBreakers,
    PutAdmission,
)


class Hand:
    """A clock turned by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Hand:
    return Hand()


def test_a_breaker_opens_after_failures_in_a_row_and_a_success_between_them_starts_over(clock: Hand) -> None:
    breaker = Breaker(clock, threshold=3)
    assert [breaker.failure(), breaker.failure()] == [False, False]
    breaker.success()
    assert [breaker.failure(), breaker.failure(), breaker.failure()] == [False, False, True]
    assert not breaker.allow()


def test_a_half_open_breaker_lets_exactly_one_caller_through(clock: Hand) -> None:
    breaker = Breaker(clock, threshold=1, first_s=1.0)
    breaker.failure()
    clock.time += 1.0
    assert breaker.state is BreakerState.HALF_OPEN
    assert [breaker.allow(), breaker.allow()] == [True, False]


def test_a_probe_that_never_reports_costs_one_pause_not_the_breaker(clock: Hand) -> None:
    breaker = Breaker(clock, threshold=1, first_s=1.0)
    breaker.failure()
    clock.time += 1.0
    assert breaker.allow()
    clock.time += 1.0
    assert breaker.allow()


def test_the_pause_doubles_with_each_failed_probe_up_to_the_longest_and_resets(clock: Hand) -> None:
    breaker = Breaker(clock, threshold=1, first_s=1.0, longest_s=4.0)
    breaker.failure()
    pauses = []
    for _ in range(4):
        before = clock.time
        while not breaker.allow():
            clock.time += 0.5
        pauses.append(clock.time - before)
        breaker.failure()
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    while not breaker.allow():
        clock.time += 0.5
    breaker.success()
    breaker.failure()
    clock.time += 1.0
    assert breaker.allow()


def test_failures_of_calls_from_before_it_opened_do_not_lengthen_the_pause(clock: Hand) -> None:
    breaker = Breaker(clock, threshold=1, first_s=1.0)
    for _ in range(5):
        breaker.failure()
    clock.time += 1.0
    assert breaker.allow()


def test_a_node_blamed_alone_is_shut_off_at_once_and_one_in_company_the_second_time(clock: Hand) -> None:
    peers = PeerBreakers(clock)
    peers.blame({"a"})
    peers.blame({"b", "c"})
    assert peers.refused() == {"a"}
    peers.blame({"b", "d"})
    assert peers.refused() == {"a", "b"}


def test_asking_about_other_nodes_does_not_use_up_a_nodes_probe(clock: Hand) -> None:
    peers = PeerBreakers(clock)
    peers.blame({"a"})
    clock.time += 1.0
    assert peers.shut_off({"b"}) == set()
    assert peers.shut_off({"a", "b"}) == set()
    assert peers.shut_off({"a"}) == {"a"}


def test_a_forgiven_node_makes_questions_about_owners_unnecessary_again(clock: Hand) -> None:
    peers = PeerBreakers(clock)
    peers.blame({"a"})
    assert peers.any_blamed
    peers.forgive({"a"})
    assert not peers.any_blamed


def test_remembered_nodes_are_bounded(clock: Hand) -> None:
    peers = PeerBreakers(clock, limit=4)
    for i in range(100):
        peers.blame({f"node-{i}"})
    assert set(peers.states()) == {f"node-{i}" for i in range(96, 100)}


def test_a_negative_entry_hides_its_name_until_it_expires(clock: Hand) -> None:
    negative = NegativeCache(clock, ttl_s=5.0)
    negative.add(["a", "b"])
    assert negative.hidden(["a", "x", "b"]) == [True, False, True]
    clock.time += 5.0
    assert negative.hidden(["a", "b"]) == [False, False]
    assert len(negative) == 0


def test_a_name_added_again_is_hidden_for_the_full_time_again(clock: Hand) -> None:
    negative = NegativeCache(clock, ttl_s=5.0)
    negative.add(["a", "b"])
    clock.time += 4.0
    negative.add(["a"])
    clock.time += 4.0
    assert negative.hidden(["a", "b"]) == [True, False]


def test_the_negative_cache_is_bounded_and_forgets_the_oldest(clock: Hand) -> None:
    negative = NegativeCache(clock, limit=3)
    negative.add([str(i) for i in range(10)])
    assert len(negative) == 3
    assert negative.hidden(["6", "7", "9"]) == [False, True, True]


def test_put_admission_backs_off_longer_while_the_pool_stays_full(clock: Hand) -> None:
    admission = PutAdmission(clock, first_s=0.25, longest_s=1.0)
    admission.refused()
    assert admission.is_backing_off and not admission.allow()
    clock.time += 0.25
    assert admission.allow()
    admission.refused()
    clock.time += 0.25
    assert not admission.allow()
    clock.time += 0.25
    assert admission.allow()
    admission.accepted()
    assert admission.allow() and not admission.is_backing_off
