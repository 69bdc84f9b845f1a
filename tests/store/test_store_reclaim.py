"""Capacity, reclaim, holds and reinsertion; striping over directories."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.engines import IoEngine, open_engine
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.clock import ManualClock
from sglang_hicache_ext.testing.crash import KillHarness, disk_bytes
from sglang_hicache_ext.testing.stamps import HostArena, page_keys

Opener = Callable[..., NvmeStore]
PAGE, BATCH = 65_536, 15
"""One batch fills most of a 1 MiB segment."""
SMALL = {"capacity": "16MiB", "segment": "1MiB"}


class Filler:
    """Writes batch after batch of new pages."""

    def __init__(self, store: NvmeStore) -> None:
        self.store, self.written = store, 0
        self.ns: Namespace = store.namespace(Fingerprint("reclaim"))
        self.arena = HostArena(BATCH, (PAGE,))

    def batch(self) -> tuple[list[bytes], set[WriteOutcome]]:
        keys = page_keys(BATCH, start=self.written)
        self.written += BATCH
        return keys, set(self.store.write(self.ns, keys, self.arena.fill(self.ns.id, keys)).outcomes)

    def read(self, keys: list[bytes]) -> tuple[Outcome, ...]:
        self.arena.poison()
        outcomes = self.store.read(self.ns, keys, self.arena.regions.slice(0, len(keys))).outcomes
        for row, outcome in enumerate(outcomes):
            assert outcome is not Outcome.LOADED or self.arena.holds(row, self.ns.id, keys[row])
        return outcomes


def test_pages_go_oldest_first_and_the_counters_say_so(nvme: Opener, tmp_path: Path) -> None:
    store = nvme(**SMALL)
    filler = Filler(store)
    batches = [filler.batch() for _ in range(30)]
    assert all(outcomes == {WriteOutcome.STORED} for _, outcomes in batches)
    found = [bool(store.contains(filler.ns, keys).all()) for keys, _ in batches]
    assert found == sorted(found), "an older batch outlived a younger one that nobody read"
    assert 0 < found.count(True) < len(found)
    assert set(filler.read(batches[0][0])) == {Outcome.EVICTED}
    counters = store.stats().counters
    gone = sum(BATCH for f in found if not f)
    assert counters["reclaimed_pages"] == gone and counters["reclaimed_segments"] >= found.count(False)
    assert KillHarness({"path": str(tmp_path / "store")}).accounting_errors(store) == []


def test_pages_that_are_read_outlive_pages_seen_once(nvme: Opener) -> None:
    store = nvme(**SMALL)
    filler = Filler(store)
    loved, _ = filler.batch()
    loved = loved[:5]
    others = []
    for _ in range(60):
        others.append(filler.batch()[0])
        assert set(filler.read(loved)) == {Outcome.LOADED}
    counters = store.metrics.snapshot().counters
    assert counters["reinserted_pages"] >= len(loved)
    assert "reclaim_scans" not in counters, "pages were counted wrong, so reclaim searched the whole index"
    assert not store.contains(filler.ns, others[0]).any()


def test_reinsertion_can_be_turned_off(nvme: Opener) -> None:
    store = nvme(**SMALL, reinsert=False)
    filler = Filler(store)
    loved, _ = filler.batch()
    for _ in range(40):
        filler.read(loved)
        filler.batch()
    assert not store.contains(filler.ns, loved).any()


def test_reclaim_makes_progress_when_everything_was_read(nvme: Opener) -> None:
    filler = Filler(nvme(**SMALL))
    for _ in range(60):
        keys, outcomes = filler.batch()
        assert outcomes == {WriteOutcome.STORED}
        assert set(filler.read(keys)) == {Outcome.LOADED}


def test_held_pages_survive_and_a_store_full_of_them_refuses(nvme: Opener) -> None:
    clock = ManualClock()
    store = nvme(**SMALL, options={"clock": clock})
    filler = Filler(store)
    kept: list[list[bytes]] = []
    for _ in range(40):
        keys, outcomes = filler.batch()
        if outcomes == {WriteOutcome.STORED}:
            kept.append(keys)
            assert store.hit_pages(filler.ns, keys, hold_s=30.0) == BATCH
    refused, outcomes = filler.batch()
    assert WriteOutcome.FULL in outcomes, "held pages were reclaimed"
    assert all(set(filler.read(keys)) == {Outcome.LOADED} for keys in kept)
    clock.advance(31.0)
    assert filler.batch()[1] == {WriteOutcome.STORED}
    assert {
        o.is_stored for o in store.write(filler.ns, refused, filler.arena.fill(filler.ns.id, refused)).outcomes
    } == {True}


def test_a_hold_is_seen_by_another_opening_of_the_directory(nvme: Opener) -> None:
    clock = ManualClock()
    holder, writer = nvme(**SMALL, options={"clock": clock}), nvme(**SMALL, options={"clock": clock})
    filler = Filler(writer)
    first, _ = filler.batch()
    assert holder.hit_pages(filler.ns, first, hold_s=10.0) == BATCH
    for _ in range(30):
        filler.batch()
    assert writer.contains(filler.ns, first).all()


def test_a_reader_that_loses_the_race_with_reclaim_sees_a_miss(nvme: Opener) -> None:
    """The lookup is done, then the segment is reused, then the bytes are read."""
    store = nvme(**SMALL)
    filler = Filler(store)
    victim, _ = filler.batch()
    engine = store._lanes.all[0].engine
    real, raced = engine.read, threading.Event()

    def read_after_reuse(plan: object, *args: object) -> object:
        if not raced.is_set():
            raced.set()
            for _ in range(40):
                filler.batch()
        return real(plan, *args)  # type: ignore[arg-type]

    engine.read = read_after_reuse  # type: ignore[method-assign,assignment]
    other = HostArena(BATCH, (PAGE,))
    outcomes = store.read(filler.ns, victim, other.regions).outcomes
    assert set(outcomes) == {Outcome.EVICTED}
    assert store.metrics.snapshot().counters.get("corrupt_pages_removed", 0) == 0


def test_a_reader_finds_a_page_that_reclaim_moved_meanwhile(nvme: Opener) -> None:
    store = nvme(**SMALL)
    filler = Filler(store)
    loved = filler.batch()[0][:5]
    assert set(filler.read(loved)) == {Outcome.LOADED}
    _, before = store._index.lookup(store._number(filler.ns), loved)
    engine = store._lanes.all[0].engine
    real, raced = engine.read, threading.Event()

    def read_after_move(plan: object, *args: object) -> object:
        if not raced.is_set():
            raced.set()
            while (store._index.lookup(store._number(filler.ns), loved)[1] == before).any():
                filler.batch()
            filler.batch()
        return real(plan, *args)  # type: ignore[arg-type]

    engine.read = read_after_move  # type: ignore[method-assign,assignment]
    mine = HostArena(5, (PAGE,))
    assert set(store.read(filler.ns, loved, mine.regions).outcomes) == {Outcome.LOADED}
    assert all(mine.holds(row, filler.ns.id, key) for row, key in enumerate(loved))
    assert store.metrics.snapshot().counters["reinserted_pages"] >= len(loved)


def test_concurrent_writers_and_readers_stay_exact_while_reclaim_runs(nvme: Opener, tmp_path: Path) -> None:
    store = nvme(**SMALL)
    ns = store.namespace(Fingerprint("reclaim"))
    failures: list[str] = []

    def work(seed: int) -> None:
        arena = HostArena(8, (PAGE // 2, PAGE // 2))
        for turn in range(40):
            keys = page_keys(8, start=seed * 10_000 + turn * 8)
            store.write(ns, keys, arena.fill(ns.id, keys))
            back = page_keys(8, start=seed * 10_000 + max(0, turn - 3) * 8)
            arena.poison()
            outcomes = store.read(ns, back, arena.regions).outcomes
            failures.extend(str(o) for o in outcomes if o not in (Outcome.LOADED, Outcome.EVICTED, Outcome.ABSENT))
            failures.extend(
                f"row {r}" for r, o in enumerate(outcomes) if o is Outcome.LOADED and not arena.holds(r, ns.id, back[r])
            )

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(t.is_alive() for t in threads) and not failures, failures[:5]
    assert KillHarness({"path": str(tmp_path / "store")}).accounting_errors(store) == []


@pytest.mark.parametrize("per_directory", [False, True])
def test_a_batch_is_spread_over_the_directories_in_runs(nvme: Opener, tmp_path: Path, per_directory: bool) -> None:
    paths = [str(tmp_path / f"drive{n}") for n in range(4)]
    made: list[str] = []

    def factory(directory: str) -> IoEngine:
        made.append(directory)
        return open_engine("posix", directory)

    store = nvme(
        path=paths, capacity="128MiB", segment="2MiB", options={"engine_factory": factory} if per_directory else {}
    )
    assert made == (paths if per_directory else [])
    ns, keys = store.namespace(Fingerprint("stripes")), page_keys(128)
    arena = HostArena(128, (PAGE,))
    assert set(store.write(ns, keys, arena.fill(ns.id, keys)).outcomes) == {WriteOutcome.STORED}
    arena.poison()
    assert set(store.read(ns, keys, arena.regions).outcomes) == {Outcome.LOADED}
    assert all(arena.holds(row, ns.id, key) for row, key in enumerate(keys))
    _, entries = store._index.lookup(store._number(ns), keys)
    directories = entries["segment"] % 4
    assert np.bincount(directories, minlength=4).tolist() == [32] * 4
    assert np.count_nonzero(np.diff(directories.astype(int))) == 3, "a directory's share must be one run"
    store.close()
    again = nvme(path=paths, capacity="128MiB", segment="2MiB")
    assert again.contains(ns, keys).all()
    assert sum(disk_bytes(p) for p in paths) <= 128 << 20


def test_one_broken_drive_does_not_refuse_what_another_can_take(
    nvme: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / f"drive{n}") for n in range(2)]
    store = nvme(path=paths, capacity="64MiB", segment="1MiB")
    (tmp_path / "drive1" / "segments").rename(tmp_path / "gone")
    filler = Filler(store)
    outcomes = [filler.batch()[1] for _ in range(8)]
    assert outcomes == [{WriteOutcome.STORED}] * 8


def _random_life(store: NvmeStore, root: Path, turns: int) -> None:
    rng = np.random.default_rng(5)
    ns = store.namespace(Fingerprint("life"))
    arena = HostArena(32, (16_384,))
    harness = KillHarness({"path": str(root)})
    for turn in range(turns):
        keys = page_keys(32, start=int(rng.integers(0, 2000)))
        roll = rng.random()
        if roll < 0.6:
            store.write(ns, keys, arena.fill(ns.id, keys))
        elif roll < 0.8:
            store.remove(ns, keys)
        elif roll < 0.99:
            store.read(ns, keys, arena.regions)
        else:
            store.clear()
        if turn % 50 == 0:
            assert harness.accounting_errors(store) == []
    assert harness.accounting_errors(store) == []


def _leak_test(nvme: Opener, tmp_path: Path, turns: int) -> None:
    import os
    import resource

    store = nvme(capacity="24MiB", segment="1MiB")
    _random_life(store, tmp_path / "store", 100)
    fds, rss = len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _random_life(store, tmp_path / "store", turns)
    assert len(os.listdir("/proc/self/fd")) <= fds + 32, "descriptors grow"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss
    assert grown < 48 << 10, f"{grown} KiB more resident"
    assert threading.active_count() < 40


@pytest.mark.slow
def test_thousands_of_operations_leak_nothing_and_the_counter_is_what_is_on_disk(nvme: Opener, tmp_path: Path) -> None:
    _leak_test(nvme, tmp_path, 600)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_million_page_operations_leak_nothing(nvme: Opener, tmp_path: Path) -> None:
    _leak_test(nvme, tmp_path, 1_000_000 // 32)
