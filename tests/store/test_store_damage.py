"""Damaged, truncated, foreign and missing files: a page is exact or a counted miss; the rest is served."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.engines.files import temporary_name
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.crash import KillHarness
from sglang_hicache_ext.testing.stamps import HostArena, page_keys

Opener = Callable[..., NvmeStore]
PAGE, N = 16_384, 24
MISSES = {Outcome.ABSENT, Outcome.EVICTED, Outcome.CORRUPT, Outcome.READ_ERROR}
KEYS = page_keys(N)
FINGERPRINT = Fingerprint("damage")


def write_all(store: NvmeStore) -> None:
    ns = store.namespace(FINGERPRINT)
    arena = HostArena(8, (PAGE,))
    for start in range(0, N, 8):  # three batches: three tables
        part = KEYS[start : start + 8]
        assert all(o.is_stored for o in store.write(ns, part, arena.fill(ns.id, part)).outcomes)


def read_all(store: NvmeStore) -> list[Outcome]:
    """Outcomes of all pages; a LOADED page has been compared."""
    ns = store.namespace(FINGERPRINT)
    arena = HostArena(N, (PAGE,))
    arena.poison()
    outcomes = store.read(ns, KEYS, arena.regions).outcomes
    for row, outcome in enumerate(outcomes):
        assert outcome is Outcome.LOADED or outcome in MISSES, outcome
        assert outcome is not Outcome.LOADED or arena.holds(row, ns.id, KEYS[row]), f"row {row} holds wrong bytes"
    return list(outcomes)


def segment_file(tmp_path: Path, number: int = 0) -> Path:
    return tmp_path / "store" / "segments" / f"{number:08d}.seg"


def flip(path: Path, offset: int, nbytes: int = 8) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        raw = bytearray(file.read(nbytes))
        file.seek(offset)
        file.write(bytes(b ^ 0xFF for b in raw))


def lose_index(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "store" / "index")


@pytest.fixture
def written(nvme: Opener, tmp_path: Path) -> Iterator[Path]:
    store = nvme()
    write_all(store)
    store.close()
    yield tmp_path


def test_a_flipped_bit_in_a_payload_is_a_corrupt_page_that_heals(nvme: Opener, written: Path) -> None:
    store = nvme()
    offset = 4096 + 4096 + 5 * PAGE + 777  # header, table, into page 5
    flip(segment_file(written), offset, 1)
    outcomes = read_all(store)
    assert outcomes[5] is Outcome.CORRUPT and outcomes.count(Outcome.LOADED) == N - 1
    assert store.metrics.snapshot().counters["corrupt_pages_removed"] == 1
    assert read_all(store)[5] is Outcome.ABSENT
    write_all(store)
    assert read_all(store) == [Outcome.LOADED] * N


@pytest.mark.parametrize("region", ["magic", "checksum", "nonce", "extent", "entry"])
def test_a_damaged_table_costs_its_batch_after_a_rebuild_and_nothing_before(
    nvme: Opener, written: Path, region: str
) -> None:
    offset = {"magic": 0, "checksum": 112, "nonce": 72, "extent": 48, "entry": 128 + 64 + 34}[region]
    flip(segment_file(written), 4096 + offset)
    store = nvme()
    assert read_all(store) == [Outcome.LOADED] * N, "the index does not need the table"
    store.close()
    lose_index(written)
    assert read_all(nvme()) == [Outcome.ABSENT] * 8 + [Outcome.LOADED] * (N - 8)


@pytest.mark.parametrize("offset", [0, 8, 16, 40, 48, 56])
def test_a_damaged_segment_header_costs_the_segment_after_a_rebuild(nvme: Opener, written: Path, offset: int) -> None:
    flip(segment_file(written), offset, 4)
    store = nvme()
    assert read_all(store) == [Outcome.LOADED] * N
    store.close()
    lose_index(written)
    store = nvme()
    assert read_all(store) == [Outcome.ABSENT] * N
    write_all(store)
    assert read_all(store) == [Outcome.LOADED] * N


@pytest.mark.parametrize("length", [0, 100, 4096, 300_000])
def test_a_truncated_segment_loses_only_what_was_cut_off(nvme: Opener, written: Path, length: int) -> None:
    os.truncate(segment_file(written), length)
    store = nvme()
    outcomes = read_all(store)
    assert set(outcomes) <= {Outcome.LOADED, Outcome.CORRUPT}
    assert (outcomes.count(Outcome.LOADED) > 0) == (length == 300_000)
    write_all(store)
    assert read_all(store) == [Outcome.LOADED] * N
    assert segment_file(written).stat().st_size == store.layout.segment_bytes


def test_a_segment_truncated_under_a_running_store_is_corrupt_and_heals(nvme: Opener, written: Path) -> None:
    store = nvme()
    os.truncate(segment_file(written), 8192)
    assert read_all(store) == [Outcome.CORRUPT] * N
    write_all(store)
    assert read_all(store) == [Outcome.LOADED] * N


def test_a_foreign_segment_file_is_never_data(nvme: Opener, written: Path) -> None:
    other = nvme("other")
    ns = other.namespace(FINGERPRINT)
    keys = page_keys(N, start=1000)
    other.write(ns, keys, HostArena(N, (PAGE,)).fill(ns.id, keys))
    other.close()
    shutil.copyfile(written / "other" / "segments" / "00000000.seg", segment_file(written))
    store = nvme()
    assert read_all(store) == [Outcome.CORRUPT] * N
    store.close()
    lose_index(written)
    store = nvme()
    assert read_all(store) == [Outcome.ABSENT] * N and not store.contains(ns, keys).any()


def test_two_segments_that_changed_places_are_never_data(nvme: Opener, tmp_path: Path) -> None:
    store = nvme(segment="256KiB")
    write_all(store)
    ns, more = store.namespace(FINGERPRINT), page_keys(30, start=500)
    store.write(ns, more, HostArena(30, (PAGE,)).fill(ns.id, more))
    store.close()
    one, two = segment_file(tmp_path, 0), segment_file(tmp_path, 2)
    os.rename(one, one.with_suffix(".x"))
    os.rename(two, one)
    os.rename(one.with_suffix(".x"), two)
    assert set(read_all(nvme(segment="256KiB"))) <= MISSES | {Outcome.LOADED}


def test_a_missing_segment_file_is_forgotten_at_open(nvme: Opener, written: Path) -> None:
    segment_file(written).unlink()
    store = nvme()
    assert read_all(store) == [Outcome.ABSENT] * N
    assert store.stats().pages == 0 and store.metrics.snapshot().counters["lost_segments"] == 1


def test_an_orphan_segment_file_is_removed_at_open(nvme: Opener, written: Path) -> None:
    orphan = segment_file(written, 7)
    orphan.write_bytes(b"x" * 100_000)
    leftovers = [orphan.with_name(temporary_name(stem)) for stem in ("00000009.seg", "engine-probe", "kvikio-probe")]
    for leftover in leftovers:
        leftover.write_bytes(b"y")
    store = nvme()
    assert not orphan.exists() and not any(leftover.exists() for leftover in leftovers)
    assert read_all(store) == [Outcome.LOADED] * N


@pytest.mark.parametrize("damage", ["garbage", "empty", "half", "gone", "meta", "leaf", "clean_mark"])
def test_a_damaged_index_is_rebuilt_from_the_segments(nvme: Opener, written: Path, damage: str) -> None:
    data = written / "store" / "index" / "data.mdb"
    size = data.stat().st_size
    if damage == "garbage":
        data.write_bytes(random.Random(1).randbytes(size))
    elif damage == "empty":
        data.write_bytes(b"")
    elif damage == "half":
        os.truncate(data, size // 2)
    elif damage == "gone":
        data.unlink()
    elif damage == "meta":
        flip(data, 16, 64)
    elif damage == "leaf":
        flip(data, size - 2000, 64)
    else:
        (written / "store" / "index" / "clean.json").write_text("{")
    store = nvme()
    assert store.metrics.snapshot().counters["index_rebuilds"] == 1
    assert read_all(store) == [Outcome.LOADED] * N


def test_an_index_of_another_boot_is_rebuilt(nvme: Opener, written: Path) -> None:
    index = written / "store" / "index"
    (index / "clean.json").unlink()
    (index / "boot").write_text("00000000-0000-0000-0000-000000000000")
    store = nvme()
    assert store.metrics.snapshot().counters["index_rebuilds"] == 1
    assert read_all(store) == [Outcome.LOADED] * N


def test_counters_that_disagree_lead_to_a_rebuild(nvme: Opener, written: Path) -> None:
    store = nvme()
    with store._index.write() as txn:
        store._files.table.add_live(txn, 0, 5)
    store.close()
    store = nvme()
    assert store.metrics.snapshot().counters["index_rebuilds"] == 1
    assert read_all(store) == [Outcome.LOADED] * N


@pytest.mark.parametrize("field", ["segment", "generation", "block", "nbytes", "digest"])
def test_a_flipped_index_entry_is_a_miss_and_never_other_bytes(nvme: Opener, written: Path, field: str) -> None:
    store = nvme()
    number = store._number(store.namespace(FINGERPRINT))
    _, entries = store._index.lookup(number, KEYS)
    damaged = entries[3:4].copy()
    if field == "digest":
        damaged["digest"] = entries["digest"][4:5]
    else:
        damaged[field] ^= {"segment": 1, "generation": 7, "block": 4, "nbytes": 1 << 20}[field]
    with store._index.write() as txn:
        assert store._index.swap(txn, number, KEYS[3:4], entries[3:4], damaged).all()
    ns = store.namespace(FINGERPRINT)
    arena = HostArena(N, (PAGE,))
    outcomes = store.read(ns, KEYS, arena.regions).outcomes
    good = [r for r in range(N) if r != 3]
    assert all(outcomes[r] is Outcome.LOADED and arena.holds(r, ns.id, KEYS[r]) for r in good)
    if field == "generation":  # the checksum proves the bytes whatever the entry says about their age
        assert outcomes[3] is Outcome.LOADED and arena.holds(3, ns.id, KEYS[3])
    else:
        assert outcomes[3] in MISSES | {Outcome.MISMATCH}
    assert store.write(ns, KEYS, arena.fill(ns.id, KEYS)).outcomes[0] is WriteOutcome.PRESENT
    assert read_all(store) == [Outcome.LOADED] * N


def test_random_damage_to_any_file_is_never_wrong_data(nvme: Opener, written: Path) -> None:
    rng = random.Random(7)
    pristine = written / "pristine"
    shutil.copytree(written / "store", pristine)
    for _ in range(12):
        shutil.rmtree(written / "store")
        shutil.copytree(pristine, written / "store")
        files = [p for p in (written / "store").rglob("*") if p.is_file() and p.name not in ("store.json", "lock.mdb")]
        for path in rng.sample(files, 2):
            size = path.stat().st_size
            if size:
                flip(path, rng.randrange(size), rng.choice((1, 64, 4096)))
        store = nvme()
        read_all(store)
        write_all(store)
        assert read_all(store) == [Outcome.LOADED] * N
        store.close()


def test_a_directory_that_vanishes_under_a_running_store_raises_nothing(nvme: Opener, written: Path) -> None:
    store = nvme()
    os.rename(written / "store" / "segments", written / "unmounted")
    store._lanes.all[0].refresh(0)
    assert set(read_all(store)) == {Outcome.READ_ERROR}
    ns, keys = store.namespace(FINGERPRINT), page_keys(200, start=900)
    outcomes = store.write(ns, keys, HostArena(200, (PAGE,)).fill(ns.id, keys)).outcomes
    assert set(outcomes) <= {WriteOutcome.FULL, WriteOutcome.WRITE_ERROR, WriteOutcome.STORED}
    os.rename(written / "unmounted", written / "store" / "segments")
    assert read_all(store) == [Outcome.LOADED] * N, "an unmounted drive is no proof that its pages are corrupt"


def test_reclaim_of_a_segment_whose_table_is_damaged_still_frees_it(nvme: Opener, tmp_path: Path) -> None:
    options: dict[str, Any] = {"capacity": "12MiB", "segment": "1MiB"}
    store = nvme(**options)
    write_all(store)
    flip(segment_file(tmp_path), 4096, 4096)
    ns, arena = store.namespace(FINGERPRINT), HostArena(16, (PAGE,))
    for start in range(1000, 1960, 16):
        keys = page_keys(16, start=start)
        assert set(store.write(ns, keys, arena.fill(ns.id, keys)).outcomes) == {WriteOutcome.STORED}
    assert set(read_all(store)) <= MISSES
    harness = KillHarness({"path": str(tmp_path / "store"), "engine": "posix", **options})
    assert harness.accounting_errors(store) == []
