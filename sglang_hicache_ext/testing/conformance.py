"""What every PageStore must do, as plain functions: no pytest needed.

    for check in CHECKS:
        check(StoreUnderTest(lambda: MyStore(...)))

Each check opens a fresh, empty store, uses it through the PageStore protocol alone, and closes it. A broken promise
raises AssertionError that says which.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from sglang_hicache_ext.errors import StoreClosedError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.page import Layout, PageGeometry
from sglang_hicache_ext.ports import Namespace, PageStore
from sglang_hicache_ext.testing.stamps import HostArena, page_keys

CHECK_TIMEOUT_S = 60.0
FINGERPRINT = Fingerprint(model="conformance", config_hash="c0", dtype="torch.bfloat16", page_tokens=64, tp="0/1")
PAGE_BYTES = 8192


@dataclass(frozen=True)
class StoreUnderTest:
    """How to open the store, and how hard to press it.

    Attributes:
        open: makes a fresh, empty store with room for at least ``room_bytes``.
        room_bytes: pages that may be written in one check without any being reclaimed.
        operations: random operations of the concurrent check, over all threads.
    """

    open: Callable[[], PageStore]
    room_bytes: int = 48 << 20
    operations: int = 10_000
    threads: int = 8

    @contextmanager
    def opened(self) -> Iterator[PageStore]:
        store = self.open()
        try:
            yield store
        finally:
            store.close()


Check = Callable[[StoreUnderTest], None]


def _store(store: PageStore, ns: Namespace, keys: Sequence[bytes], sizes: Sequence[int] = (PAGE_BYTES,)) -> None:
    arena = HostArena(len(keys), sizes)
    result = store.write(ns, keys, arena.fill(ns.id, keys))
    assert all(o.is_stored for o in result.outcomes), f"pages were refused: {set(result.outcomes)}"


def _assert_round_trip(store: PageStore, ns: Namespace, keys: list[bytes], arena: HostArena) -> None:
    wrote = store.write(ns, keys, arena.fill(ns.id, keys))
    assert wrote.outcomes == (WriteOutcome.STORED,) * len(keys), f"write: {set(wrote.outcomes)}"
    arena.poison()
    read = store.read(ns, keys, arena.regions.slice(0, len(keys)))
    assert read.outcomes == (Outcome.LOADED,) * len(keys), f"read: {set(read.outcomes)}"
    assert not read.draining and read.drain is None
    bad = [row for row, key in enumerate(keys) if not arena.holds(row, ns.id, key)]
    assert not bad, f"LOADED pages hold other bytes: rows {bad[:5]}"


def round_trip_of_any_count(sut: StoreUnderTest) -> None:
    """Whatever number of pages goes in comes out, byte for byte, one outcome a page."""
    with sut.opened() as store:
        ns = store.namespace(FINGERPRINT)
        for count in (0, 1, 2, 127, 128, 129, 1000):
            keys = page_keys(count, salt=f"count{count}")
            _assert_round_trip(store, ns, keys, HostArena(count, (PAGE_BYTES // 2, PAGE_BYTES // 2)))


def _geometries() -> Iterator[tuple[str, tuple[int, ...], int]]:
    base = PageGeometry(Layout.PAGE_FIRST, page_tokens=16, layers=4, heads=2, k_dim=64, v_dim=64, itemsize=2)
    for layout in Layout:
        yield str(layout), replace(base, layout=layout).region_sizes, 0
    yield "mla", replace(base, heads=1, k_dim=576, v_dim=0).region_sizes, 0
    yield "mla layer_first", replace(base, layout=Layout.LAYER_FIRST, heads=1, k_dim=576, v_dim=0).region_sizes, 0
    yield "512-byte regions", (512, 1024, 512), 0
    yield "no multiple of anything", (1001, 333, 7), 0
    yield "shifted by 64 bytes", (4096, 4096), 64
    yield "one byte", (1,), 0
    yield "two MiB", (1 << 20, 1 << 20), 0


def round_trip_of_any_layout(sut: StoreUnderTest) -> None:
    """Every host layout, aligned or not."""
    with sut.opened() as store:
        for name, sizes, shift in _geometries():
            ns = store.namespace(replace(FINGERPRINT, layout=name))
            keys = page_keys(5, salt=name)
            _assert_round_trip(store, ns, keys, HostArena(len(keys), sizes, shift))


def answers_have_full_length(sut: StoreUnderTest) -> None:
    """One answer per key, in order, also for no keys and for thousands."""
    with sut.opened() as store:
        ns = store.namespace(FINGERPRINT)
        there = page_keys(3)
        _store(store, ns, there)
        for count in (0, 1, 3000):
            keys = page_keys(count, salt="absent")
            arena = HostArena(count, (64,))
            assert store.contains(ns, keys).shape == (count,) and store.contains(ns, keys).dtype == np.bool_
            assert len(store.read(ns, keys, arena.regions).outcomes) == count
            assert len(store.why_absent(ns, keys)) == count
            assert store.hit_pages(ns, keys) == 0 and store.remove(ns, keys) == 0
        mixed = [there[0], *page_keys(1, salt="absent"), there[2], there[0]]
        assert store.contains(ns, mixed).tolist() == [True, False, True, True]
        outcomes = store.read(ns, mixed, HostArena(4, (PAGE_BYTES,)).regions).outcomes
        assert [o is Outcome.LOADED for o in outcomes] == [True, False, True, True]
        assert store.hit_pages(ns, mixed) == 1 and store.hit_pages(ns, there) == 3
        assert store.hit_pages(ns, there, hold_s=5.0) == 3


def a_page_is_written_once(sut: StoreUnderTest) -> None:
    """A second write of a key answers PRESENT and changes nothing; twins in a batch are one page."""
    with sut.opened() as store:
        ns = store.namespace(FINGERPRINT)
        keys = page_keys(4)
        arena = HostArena(6, (PAGE_BYTES,))
        twins = [keys[0], keys[1], keys[0], keys[2], keys[3], keys[1]]
        first = store.write(ns, twins, arena.fill(ns.id, twins)).outcomes
        assert first.count(WriteOutcome.STORED) == 4 and first.count(WriteOutcome.PRESENT) == 2, first
        before = store.stats()
        arena.poison()
        again = store.write(ns, keys, arena.regions.slice(0, 4)).outcomes
        assert again == (WriteOutcome.PRESENT,) * 4, again
        assert store.stats().pages == before.pages == 4
        assert store.read(ns, keys, arena.regions.slice(0, 4)).outcomes == (Outcome.LOADED,) * 4
        assert all(arena.holds(row, ns.id, key) for row, key in enumerate(keys)), "a second write changed the page"


def _changed(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    return {"fact": "other"} if isinstance(value, (dict,)) else f"{value}-other"


def every_fingerprint_field_separates(sut: StoreUnderTest) -> None:
    """Changing any one field of the fingerprint is a miss that names the field, and touches no memory."""
    with sut.opened() as store:
        ns = store.namespace(FINGERPRINT)
        keys = page_keys(4)
        _store(store, ns, keys)
        for field in fields(Fingerprint):
            other = store.namespace(replace(FINGERPRINT, **{field.name: _changed(getattr(FINGERPRINT, field.name))}))
            assert not store.contains(other, keys).any(), f"found under another {field.name}"
            arena = HostArena(len(keys), (PAGE_BYTES,))
            arena.poison()
            outcomes = store.read(other, keys, arena.regions).outcomes
            # Another pool of the same deployment stores other bytes under the same keys: nothing is mismatched there.
            told = Outcome.ABSENT if field.name in ("pool", "layer_start", "layer_end") else Outcome.MISMATCH
            assert outcomes == (told,) * len(keys), f"{field.name}: {outcomes}"
            assert all((arena.page(row) == 0xA5).all() for row in range(len(keys))), f"{field.name}: memory was touched"
            assert store.why_absent(other, keys) == (told,) * len(keys)
        assert store.contains(ns, keys).all()


def forgetting_is_complete(sut: StoreUnderTest) -> None:
    """remove and clear count what was there; forgotten pages are absent, not evicted; others stay."""
    with sut.opened() as store:
        ns, other = store.namespace(FINGERPRINT), store.namespace(replace(FINGERPRINT, model="other"))
        keys, rest = page_keys(10), page_keys(5, start=100)
        _store(store, ns, keys)
        _store(store, other, rest)
        assert store.remove(ns, [*keys[:4], keys[0], *page_keys(2, salt="never")]) == 4
        assert store.contains(ns, keys).tolist() == [False] * 4 + [True] * 6
        assert store.why_absent(ns, keys[:5]) == (Outcome.ABSENT,) * 4 + (Outcome.LOADED,)
        assert store.clear(ns) == 6 and store.contains(other, rest).all()
        assert store.clear() == 5 and store.stats().pages == 0
        _store(store, ns, keys)
        assert store.contains(ns, keys).all()


def what_exists_can_be_read(sut: StoreUnderTest) -> None:
    """Pages that contains affirms are read at once by another thread, while they are still being written."""
    with sut.opened() as store:
        ns = store.namespace(FINGERPRINT)
        keys = page_keys(256)
        failures: list[str] = []
        done = threading.Event()

        def look() -> None:
            arena = HostArena(len(keys), (PAGE_BYTES,))
            while not done.is_set() and not failures:
                found = np.flatnonzero(store.contains(ns, keys)).tolist()
                outcomes = store.read(ns, [keys[i] for i in found], arena.regions.slice(0, len(found))).outcomes
                bad = [o for o in outcomes if o is not Outcome.LOADED]
                wrong = [i for row, i in enumerate(found) if not bad and not arena.holds(row, ns.id, keys[i])]
                if bad or wrong:
                    failures.append(f"existing pages answered {set(bad)}, wrong bytes in {wrong[:3]}")

        reader = threading.Thread(target=look)
        reader.start()
        try:
            for start in range(0, len(keys), 8):
                _store(store, ns, keys[start : start + 8])
        finally:
            done.set()
            reader.join(CHECK_TIMEOUT_S)
        assert not reader.is_alive() and not failures, failures


def concurrent_use_never_mixes_pages(sut: StoreUnderTest) -> None:
    """Readers, writers and removers at once: a page is its own stamp or a miss, never another's."""
    with sut.opened() as store:
        spaces = [store.namespace(replace(FINGERPRINT, tp=f"{rank}/2")) for rank in range(2)]
        keys = page_keys(64)
        failures: list[str] = []
        batch = 8

        def work(seed: int) -> None:
            rng = random.Random(seed)
            arena = HostArena(batch, (PAGE_BYTES // 2, PAGE_BYTES // 2), shift=64 if seed % 4 == 3 else 0)
            for _ in range(sut.operations // sut.threads // batch):
                ns, some = rng.choice(spaces), rng.sample(keys, batch)
                roll = rng.random()
                if roll < 0.35:
                    store.write(ns, some, arena.fill(ns.id, some))
                elif roll < 0.45:
                    store.remove(ns, some[:3])
                elif roll < 0.46:
                    store.clear(ns)
                else:
                    arena.poison()
                    for row, outcome in enumerate(store.read(ns, some, arena.regions).outcomes):
                        if outcome is Outcome.LOADED and not arena.holds(row, ns.id, some[row]):
                            failures.append(f"seed {seed}: row {row} holds another page's bytes")
                        elif outcome in (Outcome.CORRUPT, Outcome.READ_ERROR, Outcome.MISMATCH):
                            failures.append(f"seed {seed}: {outcome}")
                if failures:
                    return

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(sut.threads)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + CHECK_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(t.is_alive() for t in threads), "operations hang"
        assert not failures, failures[:3]


def deadlines_bound_every_call(sut: StoreUnderTest) -> None:
    """A spent deadline gives a full answer at once; what is LOADED is right, the rest LATE, and drains end."""
    with sut.opened() as store:
        ns = store.namespace(FINGERPRINT)
        keys = page_keys(64)
        _store(store, ns, keys)
        for deadline_s in (0.0, 0.0005, 5.0):
            arena = HostArena(len(keys), (PAGE_BYTES,))
            arena.poison()
            started = time.monotonic()
            result = store.read(ns, keys, arena.regions, deadline_s)
            assert time.monotonic() - started < deadline_s + 10.0
            assert set(result.outcomes) <= {Outcome.LOADED, Outcome.LATE}, set(result.outcomes)
            assert (result.drain is None) == (not result.draining)
            assert all(result.outcomes[row] is Outcome.LATE for row in result.draining)
            assert result.drain is None or result.drain.wait(10.0), "late I/O never ended"
            loaded = [row for row, o in enumerate(result.outcomes) if o is Outcome.LOADED]
            assert all(arena.holds(row, ns.id, keys[row]) for row in loaded)
        late = page_keys(8, salt="late")
        arena = HostArena(8, (PAGE_BYTES,))
        wrote = store.write(ns, late, arena.fill(ns.id, late), 0.0)
        assert len(wrote.outcomes) == 8 and (wrote.drain is None or wrote.drain.wait(10.0))
        stored = [o.is_stored for o in wrote.outcomes]
        assert store.contains(ns, late).tolist() == stored, "a late page was published"


def outcomes_sum_up(sut: StoreUnderTest) -> None:
    """The counters hold exactly one outcome per page read and per page written."""
    with sut.opened() as store:
        metrics = getattr(store, "metrics", None)
        if metrics is None:
            return
        ns = store.namespace(FINGERPRINT)
        keys = page_keys(20)
        _store(store, ns, keys[:10])
        store.read(ns, keys, HostArena(20, (PAGE_BYTES,)).regions)
        snapshot = metrics.snapshot()
        assert snapshot.pages_queried == 20 and snapshot.outcomes == {"loaded": 10, "absent": 10}, snapshot.outcomes
        assert snapshot.writes == {"stored": 10}
        assert snapshot.counters["read_bytes"] == snapshot.counters["written_bytes"] == 10 * PAGE_BYTES
        assert snapshot.histograms["read_batch_seconds"].count == 1


def the_capacity_holds_at_every_instant(sut: StoreUnderTest) -> None:
    """Writing twice the capacity never exceeds it, keeps the youngest pages, and says what was evicted."""
    with sut.opened() as store:
        ns = store.namespace(FINGERPRINT)
        capacity, size, batch = store.stats().capacity_bytes, 256 << 10, 32
        arena = HostArena(batch, (size,))
        written: list[bytes] = []
        while len(written) * size < 2 * capacity:
            keys = page_keys(batch, start=len(written))
            outcomes = store.write(ns, keys, arena.fill(ns.id, keys)).outcomes
            assert set(outcomes) == {WriteOutcome.STORED}, f"refused though pages can be reclaimed: {set(outcomes)}"
            written += keys
            stats = store.stats()
            assert stats.used_bytes <= capacity, f"{stats.used_bytes} bytes used of {capacity}"
        found = store.contains(ns, written)
        assert found[-batch:].all(), "the youngest pages were reclaimed"
        assert 0 < found.sum() < len(written)
        gone = [k for k, there in zip(written, found.tolist(), strict=True) if not there]
        assert Outcome.EVICTED in store.why_absent(ns, gone[-64:])


def a_closed_store_refuses(sut: StoreUnderTest) -> None:
    """close is idempotent; every later call raises StoreClosedError."""
    store = sut.open()
    ns = store.namespace(FINGERPRINT)
    keys, arena = page_keys(1), HostArena(1, (PAGE_BYTES,))
    _store(store, ns, keys)
    assert store.flush(10.0)
    assert isinstance(store.describe(), dict)
    store.close()
    store.close()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: store.namespace(FINGERPRINT),
        lambda: store.contains(ns, keys),
        lambda: store.hit_pages(ns, keys),
        lambda: store.read(ns, keys, arena.regions),
        lambda: store.write(ns, keys, arena.regions),
        lambda: store.why_absent(ns, keys),
        lambda: store.remove(ns, keys),
        store.clear,
        store.flush,
        store.stats,
    )
    for call in calls:
        try:
            call()
        except StoreClosedError:
            continue
        raise AssertionError("a closed store answered")


CHECKS: tuple[Check, ...] = (
    round_trip_of_any_count,
    round_trip_of_any_layout,
    answers_have_full_length,
    a_page_is_written_once,
    every_fingerprint_field_separates,
    forgetting_is_complete,
    what_exists_can_be_read,
    concurrent_use_never_mixes_pages,
    deadlines_bound_every_call,
    outcomes_sum_up,
    the_capacity_holds_at_every_instant,
    a_closed_store_refuses,
)
