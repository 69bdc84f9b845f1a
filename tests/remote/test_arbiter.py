"""The arbiter: who goes first, how long anybody waits, and that a dead process holds up nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sglang_hicache_ext.arbiter import BURST_S, Arbiter, Traffic
from sglang_hicache_ext.errors import ConfigError

MS = 1_000_000


class Hand:
    """Nanoseconds turned by hand; sleeping turns them."""

    def __init__(self) -> None:
        self.ns = 10**12

    def now(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)

    @property
    def soon(self) -> float:
        return self.ns / 1e9 + 60.0


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def arbiter(hand: Hand, tmp_path: Path) -> Arbiter:
    return Arbiter("nic0", folder=str(tmp_path), clock_ns=hand.now, sleep=hand.sleep)


def waited_ms(hand: Hand, arbiter: Arbiter, traffic: Traffic, nbytes: int = 1000) -> float:
    before = hand.ns
    assert arbiter.acquire(traffic, nbytes, hand.soon)
    return (hand.ns - before) / MS


def test_alone_nobody_waits(hand: Hand, arbiter: Arbiter) -> None:
    assert waited_ms(hand, arbiter, Traffic.PREFETCH) == 0
    hand.ns += 100 * MS
    assert waited_ms(hand, arbiter, Traffic.BACKUP) == 0


def test_prefetch_and_backup_wait_while_a_pd_transfer_is_in_flight_but_not_for_ever(
    hand: Hand, arbiter: Arbiter
) -> None:
    with arbiter.pd(1000):
        assert 99 <= waited_ms(hand, arbiter, Traffic.PREFETCH) <= 102
    hand.ns += 100 * MS
    with arbiter.pd(1000):
        assert 950 <= waited_ms(hand, arbiter, Traffic.BACKUP) <= 1002


def test_backup_waits_for_prefetch_that_is_waiting_or_moving(hand: Hand, arbiter: Arbiter) -> None:
    arbiter.done(Traffic.PREFETCH, 1000, 0.020)  # a batch of 1000 bytes takes 20 ms
    assert waited_ms(hand, arbiter, Traffic.PREFETCH, 1000) == 0
    assert 19 <= waited_ms(hand, arbiter, Traffic.BACKUP) <= 21


def test_a_batch_is_not_started_where_it_would_meet_the_next_pd_transfer(hand: Hand, arbiter: Arbiter) -> None:
    arbiter.done(Traffic.PREFETCH, 1000, 0.005)
    for _ in range(20):  # every 12 ms, 2 ms long
        with arbiter.pd():
            hand.ns += 2 * MS
        hand.ns += 10 * MS
    hand.ns -= 9 * MS
    assert waited_ms(hand, arbiter, Traffic.PREFETCH, 1000) == 0  # 9 ms to go: fits
    hand.ns += 6 * MS
    waited = waited_ms(hand, arbiter, Traffic.PREFETCH, 1000)  # 3 ms to go: does not
    assert 3 <= waited <= 12


def test_a_batch_that_fits_nowhere_is_not_kept_waiting_for_a_gap(hand: Hand, arbiter: Arbiter) -> None:
    arbiter.done(Traffic.PREFETCH, 1000, 0.050)
    for _ in range(20):
        with arbiter.pd():
            hand.ns += 2 * MS
        hand.ns += 10 * MS
    assert waited_ms(hand, arbiter, Traffic.PREFETCH, 1000) == 0


def test_a_rate_limits_prefetch_and_backup_together_and_pd_draws_from_it(hand: Hand, tmp_path: Path) -> None:
    arbiter = Arbiter("nic1", 1_000_000, folder=str(tmp_path), clock_ns=hand.now, sleep=hand.sleep)
    start, moved = hand.ns, 0
    while moved < 2_000_000:
        assert arbiter.acquire(Traffic.PREFETCH, 10_000, hand.soon)
        moved += 10_000
    rate = (moved - 1_000_000 * BURST_S) / ((hand.ns - start) / 1e9)
    assert 0.9e6 < rate < 1.1e6
    with arbiter.pd(500_000):
        pass
    assert waited_ms(hand, arbiter, Traffic.PREFETCH) >= 400


def test_the_deadline_ends_a_wait_with_false(hand: Hand, arbiter: Arbiter) -> None:
    with arbiter.pd():
        assert not arbiter.acquire(Traffic.BACKUP, 1, hand.ns / 1e9 + 0.05)
    assert not arbiter.acquire(Traffic.PREFETCH, 1, hand.ns / 1e9 - 1)


def test_two_handles_share_one_state(hand: Hand, tmp_path: Path) -> None:
    one, two = (Arbiter("n", folder=str(tmp_path), clock_ns=hand.now, sleep=hand.sleep) for _ in range(2))
    with one.pd():
        assert waited_ms(hand, two, Traffic.PREFETCH) >= 99
    assert waited_ms(hand, two, Traffic.PREFETCH) == 0


def test_a_pd_process_that_was_killed_in_a_transfer_holds_up_nobody_for_longer_than_a_second(tmp_path: Path) -> None:
    script = (
        "import sys, os, time; from sglang_hicache_ext.arbiter import Arbiter\n"
        f"with Arbiter('n', folder={str(tmp_path)!r}).pd(): print('in', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"in\n"
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()
    arbiter = Arbiter("n", folder=str(tmp_path))
    deadline = time.monotonic() + 5.0
    while True:
        started = time.monotonic()
        assert arbiter.acquire(Traffic.PREFETCH, 1, started + 5.0)
        if time.monotonic() - started < 0.02:
            break
        assert time.monotonic() < deadline
    arbiter.close()


def test_many_threads_and_transfers_leave_no_one_announced(tmp_path: Path) -> None:
    arbiter = Arbiter("n", folder=str(tmp_path))

    def work() -> None:
        for _ in range(200):
            with arbiter.pd(1):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    started = time.monotonic()
    assert arbiter.acquire(Traffic.BACKUP, 1, started + 5.0) and time.monotonic() - started < 0.1
    arbiter.close()


@pytest.mark.parametrize("name", ["", "a/b", "../x", "n" * 65])
def test_a_name_that_is_no_device_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mlx5_0"):
        Arbiter(name, folder=str(tmp_path))


def test_the_state_is_private_to_the_user(tmp_path: Path) -> None:
    Arbiter("n", folder=str(tmp_path)).close()
    (state,) = tmp_path.iterdir()
    assert state.stat().st_mode & 0o777 == 0o600


def test_batches_are_four_to_sixteen_pages_and_small_beside_pd_traffic(hand: Hand, arbiter: Arbiter) -> None:
    def pages(kib: int) -> int:
        return arbiter.batch_pages(Traffic.PREFETCH, kib << 10)

    assert [pages(kib) for kib in (16, 64, 256, 1024, 4096)] == [16, 16, 16, 4, 4]
    arbiter.done(Traffic.PREFETCH, 1 << 20, 0.002)  # 0.5 ms for 256 KiB
    for _ in range(20):  # every 12 ms, 2 ms long: 10 ms are free, a batch gets half of them
        with arbiter.pd():
            hand.ns += 2 * MS
        hand.ns += 10 * MS
    assert [pages(kib) for kib in (64, 256, 1024)] == [16, 10, 4]
    hand.ns += 2_000 * MS
    assert pages(256) == 16, "the traffic has ended"


def test_a_handle_that_is_closed_gives_its_slot_back(hand: Hand, tmp_path: Path) -> None:
    for _ in range(100):  # more than there are slots
        arbiter = Arbiter("n", folder=str(tmp_path), clock_ns=hand.now, sleep=hand.sleep)
        with arbiter.pd(1):
            assert waited_ms(hand, arbiter, Traffic.PREFETCH) >= 99
        arbiter.close()
        hand.ns += 2_000 * MS
