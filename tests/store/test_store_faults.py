"""What a bad drive does to a page: a miss or a refused write with its reason; the others are served."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
import pytest
from store_faults_kit import BadDrive, HeldDrain, fail, never_end, shorten

from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.engines import open_engine
from sglang_hicache_ext.storage_backends.nvme import prealloc
from sglang_hicache_ext.storage_backends.nvme.segments import State
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.stamps import HostArena, page_keys

PAGE = 256 << 10
"""One page, one operation: verdicts can strike single pages."""
N = 6


class Rig:
    """A store on a bad drive, with N pages written."""

    def __init__(self, store: NvmeStore, drive: BadDrive) -> None:
        self.store, self.drive = store, drive
        self.ns: Namespace = store.namespace(Fingerprint("faults"))
        self.keys = page_keys(N)
        self.arena = HostArena(N, (PAGE,))

    def write(self, keys: list[bytes] | None = None) -> tuple[WriteOutcome, ...]:
        keys = self.keys if keys is None else keys
        return self.store.write(self.ns, keys, self.arena.fill(self.ns.id, keys)).outcomes

    def read(self) -> tuple[Outcome, ...]:
        self.arena.poison()
        outcomes = self.store.read(self.ns, self.keys, self.arena.regions).outcomes
        for row, outcome in enumerate(outcomes):
            assert outcome is not Outcome.LOADED or self.arena.holds(row, self.ns.id, self.keys[row])
        return outcomes

    def counter(self, name: str) -> float:
        return self.store.metrics.snapshot().counters.get(name, 0)


@pytest.fixture
def rig(nvme: Callable[..., NvmeStore], tmp_path: os.PathLike[str]) -> Rig:
    drive = BadDrive(open_engine("posix", str(tmp_path)))
    return Rig(nvme(capacity="64MiB", segment="4MiB", options={"engine": drive}), drive)


def test_a_read_error_is_a_miss_and_the_page_stays(rig: Rig) -> None:
    rig.write()
    rig.drive.on_read = fail(errno.EIO, 2)
    assert rig.read() == tuple(Outcome.READ_ERROR if i == 2 else Outcome.LOADED for i in range(N))
    assert rig.counter("read_errors_eio") == 1
    rig.drive.on_read = None
    assert rig.read() == (Outcome.LOADED,) * N


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (errno.EIO, WriteOutcome.WRITE_ERROR),
        (errno.EACCES, WriteOutcome.WRITE_ERROR),
        (errno.ENOSPC, WriteOutcome.FULL),
        (errno.EDQUOT, WriteOutcome.FULL),
    ],
)
def test_a_failed_write_refuses_only_its_page_and_the_hole_heals(rig: Rig, code: int, outcome: WriteOutcome) -> None:
    rig.drive.on_write = lambda plan, res: fail(code, 3)(plan, res) if len(plan) == N else None
    assert rig.write() == tuple(outcome if i == 3 else WriteOutcome.STORED for i in range(N))
    assert rig.store.contains(rig.ns, rig.keys).tolist() == [i != 3 for i in range(N)]
    rig.drive.on_write = None
    assert rig.write() == tuple(WriteOutcome.STORED if i == 3 else WriteOutcome.PRESENT for i in range(N))
    assert rig.read() == (Outcome.LOADED,) * N


def test_a_failed_page_write_is_not_found_after_a_rebuild_either(
    rig: Rig, nvme: Callable[..., NvmeStore], tmp_path: os.PathLike[str]
) -> None:
    rig.drive.on_write = lambda plan, res: fail(errno.EIO, 3)(plan, res) if len(plan) == N else None
    rig.write()
    rig.store.close()
    _lose_index(tmp_path)
    store = nvme(capacity="64MiB", segment="4MiB")
    assert store.contains(rig.ns, rig.keys).tolist() == [i != 3 for i in range(N)]


def _lose_index(tmp_path: os.PathLike[str]) -> None:
    for name in os.listdir(os.path.join(tmp_path, "store", "index")):
        os.unlink(os.path.join(tmp_path, "store", "index", name))


def test_a_failed_table_write_publishes_nothing(rig: Rig) -> None:
    rig.drive.on_write = lambda plan, res: fail(errno.EIO)(plan, res) if len(plan) != N else None
    assert rig.write() == (WriteOutcome.WRITE_ERROR,) * N
    assert not rig.store.contains(rig.ns, rig.keys).any()
    rig.drive.on_write = None
    assert rig.write() == (WriteOutcome.STORED,) * N


def test_device_durability_publishes_only_what_was_synced(nvme: Callable[..., NvmeStore], tmp_path: str) -> None:
    drive = BadDrive(open_engine("posix", str(tmp_path)))
    rig = Rig(nvme(capacity="64MiB", segment="4MiB", durability="device", options={"engine": drive}), drive)
    synced: list[int] = []

    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "the cache did not reach the medium")

    drive.on_sync = broken
    assert rig.write() == (WriteOutcome.WRITE_ERROR,) * N
    assert not rig.store.contains(rig.ns, rig.keys).any()
    drive.on_sync = synced.append
    assert rig.write() == (WriteOutcome.STORED,) * N and synced
    assert rig.store.flush(5.0)


def test_a_short_read_of_a_whole_file_is_an_error_of_the_device(rig: Rig) -> None:
    rig.write()
    rig.drive.on_read = shorten
    assert rig.read() == (Outcome.READ_ERROR,) * N
    assert rig.counter("read_retried_pages") == N
    rig.drive.on_read = None
    assert rig.read() == (Outcome.LOADED,) * N


def test_a_file_that_cannot_be_opened_is_a_miss_or_a_refusal(rig: Rig) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "no", path)

    rig.drive.on_open = refuse
    assert rig.write() == (WriteOutcome.WRITE_ERROR,) * N
    rig.drive.on_open = lambda path: None
    assert rig.write() == (WriteOutcome.STORED,) * N
    for lane in rig.store._lanes.all:
        lane.refresh(0)
    rig.drive.on_open = refuse
    assert rig.read() == (Outcome.READ_ERROR,) * N
    rig.drive.on_open = lambda path: None
    assert rig.read() == (Outcome.LOADED,) * N


def test_a_late_read_names_the_memory_that_is_still_in_use(rig: Rig) -> None:
    rig.write()
    rig.drive.on_read = never_end
    result = rig.store.read(rig.ns, rig.keys, rig.arena.regions, 0.01)
    assert result.outcomes == (Outcome.LATE,) * N
    assert result.draining == tuple(range(N)) and result.drain is not None and not result.drain.is_done()
    rig.drive.drain.is_over = True
    assert result.drain.is_done()


def test_a_late_write_is_never_published_and_its_space_not_reused_before_the_device_lets_go(rig: Rig) -> None:
    rig.drive.on_write = lambda plan, res: never_end(plan, res) if len(plan) == N else None
    result = rig.store.write(rig.ns, rig.keys, rig.arena.fill(rig.ns.id, rig.keys))
    assert result.outcomes == (WriteOutcome.LATE,) * N
    assert result.draining == tuple(range(N)) and result.drain is not None
    late_plan = rig.drive.writes[0]
    drain, rig.drive.drain, rig.drive.on_write = rig.drive.drain, HeldDrain(), None
    rows = rig.store._files.table.snapshot()
    assert [r.state for r in rows] == [State.OPEN]
    for start in range(100, 400, N):  # several times the capacity: everything else is reused
        assert set(rig.write(page_keys(N, start=start))) == {WriteOutcome.STORED}
    first_segment = [s for s in rig.store._files.table.snapshot() if s.number == rows[0].number]
    assert first_segment[0].state is State.OPEN and first_segment[0].generation == rows[0].generation
    taken = {int(o) for o in late_plan.offsets}
    later = [p for p in rig.drive.writes[1:] if (p.files == late_plan.files[0]).any()]
    for plan in later:
        reused = taken & {int(o) for o in plan.offsets[plan.files == late_plan.files[0]]}
        assert not reused, "an extent was written again while its late write may still be running"
    drain.is_over = True
    for start in range(400, 700, N):
        rig.write(page_keys(N, start=start))
    released = next(s for s in rig.store._files.table.snapshot() if s.number == rows[0].number)
    assert released.generation > rows[0].generation, "the segment never came back"
    assert not rig.store.contains(rig.ns, rig.keys).any()


def test_late_unaligned_io_leaves_the_hosts_memory_alone(rig: Rig) -> None:
    arena = HostArena(N, (PAGE - 100, 100), shift=8)
    rig.store.write(rig.ns, rig.keys, arena.fill(rig.ns.id, rig.keys))
    rig.drive.on_read = never_end
    arena.poison()
    result = rig.store.read(rig.ns, rig.keys, arena.regions, 0.05)
    assert result.outcomes == (Outcome.LATE,) * N and not result.draining and result.drain is None
    assert all((arena.page(row) == 0xA5).all() for row in range(N))


def test_bounce_memory_is_bounded_when_late_reads_hold_it(rig: Rig) -> None:
    arena = HostArena(N, (PAGE - 100, 100), shift=8)
    rig.store.write(rig.ns, rig.keys, arena.fill(rig.ns.id, rig.keys))
    rig.drive.on_read = never_end
    for _ in range(12):
        result = rig.store.read(rig.ns, rig.keys, arena.regions, 0.001)
        assert set(result.outcomes) == {Outcome.LATE}
    assert rig.store._bounce._used <= 64 << 20
    rig.drive.on_read, rig.drive.drain.is_over = None, True
    assert set(rig.store.read(rig.ns, rig.keys, arena.regions).outcomes) == {Outcome.LOADED}


def test_a_file_system_without_fallocate_gets_zeros_instead(
    nvme: Callable[..., NvmeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(prealloc.os, "posix_fallocate", unsupported)
    store = nvme()
    ns, keys = store.namespace(Fingerprint("m")), page_keys(4)
    assert set(store.write(ns, keys, HostArena(4, (16384,)).fill(ns.id, keys)).outcomes) == {WriteOutcome.STORED}
    assert store.describe()["preallocation"] == "zeros"
    assert os.stat(store.layout.segment_path(0)).st_blocks * 512 >= store.layout.segment_bytes


def test_a_disk_that_others_filled_refuses_new_segments_and_reuses_its_own(
    nvme: Callable[..., NvmeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = nvme(capacity="32MiB", segment="1MiB")
    ns, arena = store.namespace(Fingerprint("m")), HostArena(16, (65536,))

    def write(start: int) -> set[WriteOutcome]:
        keys = page_keys(16, start=start)
        return set(store.write(ns, keys, arena.fill(ns.id, keys)).outcomes)

    for start in range(0, 64, 16):
        assert write(start) == {WriteOutcome.STORED}
    before = store.stats().used_bytes

    def no_space(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "somebody else filled the disk")

    monkeypatch.setattr(prealloc.os, "posix_fallocate", no_space)
    for start in range(64, 320, 16):
        assert write(start) == {WriteOutcome.STORED}
    assert store.stats().used_bytes - before < store.layout.segment_bytes, "a segment file was left behind"
    assert store.metrics.snapshot().counters["segment_errors_enospc"] > 0


def test_a_disk_full_from_the_start_refuses_and_recovers(
    nvme: Callable[..., NvmeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = nvme()
    ns, keys, arena = store.namespace(Fingerprint("m")), page_keys(4), HostArena(4, (16384,))
    real = os.posix_fallocate

    def no_space(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(prealloc.os, "posix_fallocate", no_space)
    assert set(store.write(ns, keys, arena.fill(ns.id, keys)).outcomes) == {WriteOutcome.FULL}
    assert store._files.table.snapshot() == [] and not list(store.layout.segment_dir(0).iterdir())
    monkeypatch.setattr(prealloc.os, "posix_fallocate", real)
    assert set(store.write(ns, keys, arena.fill(ns.id, keys)).outcomes) == {WriteOutcome.STORED}


def test_a_full_index_makes_room_instead_of_refusing(nvme: Callable[..., NvmeStore]) -> None:
    store = nvme(capacity="512MiB", segment="8MiB")
    store._index._most_pages = 4000
    ns, arena = store.namespace(Fingerprint("m")), HostArena(512, (4096,))
    outcomes: list[WriteOutcome] = []
    for start in range(0, 16 * 1024, 512):
        keys = page_keys(512, start=start)
        outcomes += store.write(ns, keys, arena.fill(ns.id, keys)).outcomes
    assert store.metrics.snapshot().counters["index_full"] > 0
    assert set(outcomes) == {WriteOutcome.STORED}
    assert store.contains(ns, keys).all()


def test_a_page_larger_than_a_segment_is_refused(nvme: Callable[..., NvmeStore]) -> None:
    store = nvme()
    ns, keys = store.namespace(Fingerprint("m")), page_keys(2)
    arena = HostArena(2, (2 << 20,))
    assert set(store.write(ns, keys, arena.fill(ns.id, keys)).outcomes) == {WriteOutcome.FULL}
    assert np.count_nonzero(store.contains(ns, keys)) == 0
    assert store.stats().used_bytes < 8 << 20, "segments were used up for nothing"
