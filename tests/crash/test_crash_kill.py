"""kill -9 at random and at named points: what was published is exact, the rest is a miss, nothing leaks."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from sglang_hicache_ext.storage_backends.nvme.segments import State
from sglang_hicache_ext.testing.crash import Child, KillHarness

pytestmark = pytest.mark.slow

POINTS = (
    "segment_reserved",
    "segment_header",
    "extent_taken",
    "payload_written",
    "table_written",
    "before_publish",
    "after_publish",
    "segment_sealed",
    "reclaim_moved",
    "reclaim_forgot",
    "reclaim_emptied",
    "reclaim_freed",
)
ROOMY = {"capacity": "1GiB", "segment": "1MiB", "engine": "posix"}
"""Nothing is reclaimed: every acknowledged page must be there."""
TIGHT = {"capacity": "24MiB", "segment": "1MiB", "engine": "posix"}
"""Reclaim all the time: every page is exact or a miss."""


def _settle(harness: KillHarness, child: Child, written: list[int], *, may_miss: bool) -> None:
    """After a kill: take in the acknowledged pages, verify all pages ever written, and the accounts."""
    written += [first + i for first, pages in child.acknowledged() for i in range(pages)]
    with harness.opened() as store:
        found = harness.verify(store, written)
        assert not found.wrong, found.wrong[:5]
        assert may_miss or not found.missing, f"published pages are lost: {found.missing[:5]} of {len(written)}"
        assert not may_miss or found.loaded or not written
        assert harness.accounting_errors(store) == []
        owned = [s.number for s in store._files.table.snapshot() if s.state is State.OPEN]
        assert not owned, f"segments {owned} still belong to a dead process"


def _random_rounds(tmp_path: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    for name, limits in (("roomy", ROOMY), ("tight", TIGHT)):
        harness = KillHarness({"path": str(tmp_path / name), **limits})
        written: list[int] = []
        for number in range(rounds // 2):
            child = harness.start(number * 1_000_000, read_share=0.5)
            child.await_start()
            child.kill_after(rng.uniform(0.0, 0.15))
            if number % 5 == 4:
                shutil.rmtree(tmp_path / name / "index")  # and the index is gone as well
            _settle(harness, child, written, may_miss=name == "tight")
            del written[:-4096]
        assert written, "no child ever published a page"


def test_a_kill_at_a_random_moment_loses_only_unpublished_pages(tmp_path: Path) -> None:
    _random_rounds(tmp_path, 14, seed=1)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_hundred_random_kills(tmp_path: Path) -> None:
    _random_rounds(tmp_path, 200, seed=2)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_a_named_point_loses_only_unpublished_pages(tmp_path: Path, point: str) -> None:
    reclaims = point.startswith(("reclaim", "segment_sealed"))
    harness = KillHarness({"path": str(tmp_path / "s"), **(TIGHT if reclaims else ROOMY)})
    written: list[int] = []
    child = harness.start(0, kill_point=point, kill_visit=3, read_share=0.5)
    child.end()
    assert child.process.exitcode == -9, f"the point {point} was never reached"
    _settle(harness, child, written, may_miss=reclaims)
    again = harness.start(1_000_000, batches=30)  # and a successor goes on
    again.end()
    assert again.process.exitcode == 0
    _settle(harness, again, written, may_miss=reclaims)


def test_a_kill_while_the_store_opens_leaves_it_openable(tmp_path: Path) -> None:
    rng = random.Random(3)
    harness = KillHarness({"path": str(tmp_path / "s"), **ROOMY})
    written: list[int] = []
    for number in range(20):
        child = harness.start(number * 1_000_000, batches=20)
        child.kill_after(rng.uniform(0.0, 0.1))
        _settle(harness, child, written, may_miss=False)


def test_eight_processes_share_one_directory(tmp_path: Path) -> None:
    """Started in the same second on a directory that does not exist yet; half are killed, all are started again."""
    harness = KillHarness({"path": str(tmp_path / "shared"), **ROOMY})
    written: list[int] = []
    for turn in range(2):
        children = [harness.start(turn * 10_000_000 + n * 1_000_000, batches=40, read_share=0.3) for n in range(8)]
        for child in children:
            child.await_start()
        for child in children[::2]:
            child.kill_after(0.02)
        for child in children[1::2]:
            child.end()
            assert child.process.exitcode == 0
        for child in children:
            written += [first + i for first, pages in child.acknowledged() for i in range(pages)]
    with harness.opened() as store:
        found = harness.verify(store, written)
        assert not found.wrong and not found.missing, (found.wrong[:3], found.missing[:3])
        assert len(written) > 8 * 16 and harness.accounting_errors(store) == []


def test_eight_processes_together_stay_within_the_capacity(tmp_path: Path) -> None:
    tight = {**TIGHT, "capacity": "48MiB"}
    harness = KillHarness({"path": str(tmp_path / "shared"), **tight})
    children = [harness.start(n * 1_000_000, batches=60, read_share=0.3) for n in range(8)]
    written: list[int] = []
    with harness.opened() as store:
        while any(c.process.is_alive() for c in children):
            assert store.stats().used_bytes <= 48 << 20
            children[0].process.join(0.01)
        for child in children:
            child.end()
            assert child.process.exitcode == 0
            written += [first + i for first, pages in child.acknowledged() for i in range(pages)]
        found = harness.verify(store, written)
        assert not found.wrong, found.wrong[:5]
        assert found.loaded and harness.accounting_errors(store) == []
