"""Faults that strike beside the page itself: in the index, in the middle of a second look, at the end of a process."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from store_faults_kit import BadDrive

from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.engines import PENDING, IoPlan, open_engine
from sglang_hicache_ext.storage_backends.nvme import explain, index, layout, tables
from sglang_hicache_ext.storage_backends.nvme.layout import write_atomically
from sglang_hicache_ext.storage_backends.nvme.recovery import MAX_NAMESPACE_FILES
from sglang_hicache_ext.storage_backends.nvme.segments import State
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.stamps import HostArena, page_keys

Opener = Callable[..., NvmeStore]
PAGE = 256 << 10


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def break_commits(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error) -> None:
    """Every index transaction fails at its commit, as on a disk that others filled."""
    real = store._index.write

    @contextlib.contextmanager
    def refusing() -> Iterator[Any]:
        with real() as txn:
            yield txn
            raise error

    monkeypatch.setattr(store._index, "write", refusing)


def pages(store: NvmeStore, first: int, count: int, nbytes: int = PAGE) -> tuple[list[bytes], HostArena, Any]:
    ns = store.namespace(Fingerprint("hard"))
    return page_keys(count, start=first), HostArena(count, (nbytes,)), ns


def put(store: NvmeStore, first: int, count: int, nbytes: int = PAGE) -> tuple[WriteOutcome, ...]:
    keys, arena, ns = pages(store, first, count, nbytes)
    return store.write(ns, keys, arena.fill(ns.id, keys)).outcomes


def test_memory_that_is_still_written_to_is_named_even_when_the_index_fails(
    nvme: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = BadDrive(open_engine("posix", str(tmp_path)))
    store = nvme(capacity="64MiB", segment="4MiB", options={"engine": drive})
    keys, arena, ns = pages(store, 0, 4)
    store.write(ns, keys, arena.fill(ns.id, keys))
    segment, block = (int(store._index.lookup(1, keys)[1][3][f]) for f in ("segment", "block"))
    with store.layout.segment_path(segment).open("r+b") as file:
        file.seek(block * 4096)
        file.write(b"rot")

    def second_page_late(plan: IoPlan, res: np.ndarray[Any, Any]) -> None:
        if len(res) == 4:
            res[1] = PENDING

    drive.on_read = second_page_late  # page 1 is late, page 3 is corrupt and has to be removed
    break_commits(store, monkeypatch, lmdb.DiskError("No space left on device"))
    arena.poison()
    result = store.read(ns, keys, arena.regions)
    assert result.drain is not None and not result.drain.is_done()
    assert result.draining == (1,)
    assert result.outcomes[1] is Outcome.LATE
    assert result.outcomes[3] in (Outcome.CORRUPT, Outcome.READ_ERROR)


def test_bounce_memory_is_not_used_again_while_a_late_move_still_reads_into_it(nvme: Opener, tmp_path: Path) -> None:
    drive = BadDrive(open_engine("posix", str(tmp_path)))
    store = nvme(capacity="64MiB", segment="4MiB", options={"engine": drive})
    given: list[object] = []
    real = store._bounce.give
    store._bounce.give = lambda slot, drain=None: (given.append(drain), real(slot, drain))[1]  # type: ignore[method-assign]
    keys, arena, ns = pages(store, 0, 4)
    store.write(ns, keys, arena.fill(ns.id, keys))

    def late(plan: IoPlan, res: np.ndarray[Any, Any]) -> None:
        res[:] = PENDING

    drive.on_read = late
    _, old = store._index.lookup(1, keys)
    store._reclaim._move(0, ns.id, 1, keys, old)  # type: ignore[misc]
    assert given == [drive.drain]


def test_a_commit_that_fails_leaks_neither_descriptor_nor_segment(
    nvme: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = nvme(capacity="32MiB", segment="1MiB")
    put(store, 0, 2)
    before = descriptors()
    with monkeypatch.context() as broken:
        break_commits(store, broken, lmdb.DiskError("No space left on device"))
        for turn in range(1, 9):
            with contextlib.suppress(Exception):
                put(store, 10 * turn, 3)
        assert descriptors() <= before + 1, "each refused segment left its descriptor behind"
    for turn in range(20, 30):
        assert set(put(store, 10 * turn, 3)) == {WriteOutcome.STORED}
    with_lock = [s for s in store._files.table.snapshot() if s.state is State.OPEN]
    assert len(with_lock) == 1, "a segment that could not be sealed was never sealed later"


def test_a_bad_sector_under_a_table_does_not_stop_reclaim_for_ever(
    nvme: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = nvme(capacity="16MiB", segment="1MiB")
    put(store, 0, 3)
    real = os.pread

    class BadSector:
        posix_fadvise, POSIX_FADV_RANDOM = staticmethod(os.posix_fadvise), os.POSIX_FADV_RANDOM
        lseek, SEEK_DATA = staticmethod(os.lseek), os.SEEK_DATA

        @staticmethod
        def pread(fd: int, nbytes: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("00000000.seg"):
                raise OSError(errno.EIO, "bad sector")
            return real(fd, nbytes, offset)

    monkeypatch.setattr(tables, "os", BadSector)
    for turn in range(1, 30):
        assert set(put(store, 10 * turn, 3)) == {WriteOutcome.STORED}, f"turn {turn}"
    keys, _, ns = pages(store, 0, 3)
    assert not store.contains(ns, keys).any()


def test_a_bad_sector_costs_a_rebuild_one_segment_not_the_store(
    nvme: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = nvme(capacity="16MiB", segment="1MiB")
    for turn in range(4):
        put(store, 10 * turn, 3)
    store.close()
    shutil.rmtree(tmp_path / "store" / "index")
    real = os.pread

    class BadSector:
        posix_fadvise, POSIX_FADV_RANDOM = staticmethod(os.posix_fadvise), os.POSIX_FADV_RANDOM
        lseek, SEEK_DATA = staticmethod(os.lseek), os.SEEK_DATA

        @staticmethod
        def pread(fd: int, nbytes: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("00000001.seg"):
                raise OSError(errno.EIO, "bad sector")
            return real(fd, nbytes, offset)

    monkeypatch.setattr(tables, "os", BadSector)
    again = nvme(capacity="16MiB", segment="1MiB")
    found = [bool(again.contains(pages(again, 10 * t, 3)[2], page_keys(3, start=10 * t)).all()) for t in range(4)]
    assert found == [True, False, True, True]


_READER = """
import lmdb, sys, time
env = lmdb.open(sys.argv[1], map_size=int(sys.argv[2]), max_dbs=8, create=False, max_readers=1024)
txn = env.begin()
txn.stat()
print("reading", flush=True)
time.sleep(60)
"""


def test_a_reader_that_was_killed_does_not_fill_the_index_for_ever(nvme: Opener) -> None:
    store = nvme(capacity="32MiB", segment="1MiB")
    put(store, 0, 2, 16384)
    path = str(store._index.path)
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, path, str(store.layout.map_bytes)], stdout=subprocess.PIPE, text=True
    )
    with reader:
        assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
        reader.kill()
    outcomes = set()
    for turn in range(1, 60):
        outcomes |= set(put(store, 100 * turn, 60, 4096))
        if WriteOutcome.FULL in outcomes:
            break
    assert outcomes == {WriteOutcome.STORED}, f"turn {turn}: {store.metrics.snapshot().counters}"


_FORK = """
import os, sys
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

config = {"path": sys.argv[1], "capacity": "32MiB", "segment": "1MiB", "engine": "posix"}
store = NvmeStore(HiCacheExtConfig.parse(config))
ns = store.namespace(Fingerprint("fork"))
store.contains(ns, [bytes(32)])
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(store.contains(ns, [bytes(32)]).tolist())
    store.close()
"""


def test_a_forked_child_that_ends_does_not_cost_its_parent_a_read(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORK, str(tmp_path / "store")], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "[False]\n", done.stderr


def test_many_weight_updates_stay_within_the_capacity(nvme: Opener, tmp_path: Path) -> None:
    store = nvme(capacity="32MiB", segment="1MiB")
    for epoch in range(80):
        store.namespace(Fingerprint("model", epoch=f"update-{epoch}"))
    files = list((tmp_path / "store" / "namespaces").iterdir())
    assert len(files) <= MAX_NAMESPACE_FILES
    locks = (tmp_path / "store" / "index" / "lock.mdb").stat().st_blocks * 512
    assert store._presence.small_files_bytes() + locks <= layout.SMALL_FILES_BYTES


def test_a_miss_does_not_cost_more_with_every_weight_update(nvme: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = nvme(capacity="32MiB", segment="1MiB")
    keys, arena, ns = pages(store, 0, 1)
    for epoch in range(300):
        known = Fingerprint("hard", epoch=f"update-{epoch}")
        store._index.namespace_number(known.namespace_id, known.words())
    decoded: list[bytes] = []
    real = index._words
    monkeypatch.setattr(index, "_words", lambda raw: (decoded.append(raw), real(raw))[1])
    assert store.read(ns, keys, arena.regions).outcomes == (Outcome.ABSENT,)
    assert 0 < len(decoded) <= explain.MAX_NAMESPACES


def test_a_file_that_others_remove_meanwhile_does_not_spoil_the_statistics(
    nvme: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = nvme()
    real = os.scandir

    def racing(path: Any) -> Any:
        temporary = Path(path) / ".x.json.1.00000000"
        temporary.write_bytes(b"{}")
        entries = list(real(path))
        temporary.unlink()
        return contextlib.nullcontext(entries)

    monkeypatch.setattr("sglang_hicache_ext.storage_backends.nvme.presence.os.scandir", racing)
    assert store.stats().used_bytes > 0


def test_a_full_disk_leaves_no_half_written_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, raw: real(fd, bytes(raw)[:3]))
    write_atomically(tmp_path / "store.json", b"0123456789")
    assert (tmp_path / "store.json").read_bytes() == b"0123456789"

    def full(fd: int, raw: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        with pytest.raises(OSError, match="full"):
            write_atomically(tmp_path / "other.json", b"0123456789")
    assert [p.name for p in tmp_path.iterdir()] == ["store.json"]
