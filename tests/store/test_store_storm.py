"""A drive on which everything goes wrong at random, with seeds: never a wrong byte, and the accounts add up."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.engines import open_engine
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.crash import KillHarness
from sglang_hicache_ext.testing.engine_faults import Fault, FaultPlan, FaultyEngine
from sglang_hicache_ext.testing.stamps import HostArena, page_keys

SIZES = (32_768, 32_768)
BATCH = 8
READ_FAULTS = {Fault.EIO: 0.04, Fault.SHORT: 0.03, Fault.FLIP: 0.03, Fault.HANG: 0.02, Fault.EACCES: 0.01}
WRITE_FAULTS = {Fault.EIO: 0.04, Fault.ENOSPC: 0.03, Fault.FLIP: 0.02, Fault.HANG: 0.02}
NEVER = {Outcome.MISMATCH, Outcome.HOLE}


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_faults_never_delivers_a_wrong_byte(
    nvme: Callable[..., NvmeStore], tmp_path: Path, seed: int
) -> None:
    drive = FaultyEngine(open_engine("posix", str(tmp_path)), FaultPlan(seed, READ_FAULTS, WRITE_FAULTS))
    store = nvme(capacity="24MiB", segment="1MiB", options={"engine": drive})
    ns, rng = store.namespace(Fingerprint("storm")), random.Random(seed)
    arena, stored = HostArena(BATCH, SIZES), set[bytes]()
    for turn in range(150):
        keys = page_keys(BATCH, start=rng.randrange(60) * BATCH)
        if turn % 2:
            wrote = store.write(ns, keys, arena.fill(ns.id, keys), 2.0)
            stored.update(k for k, o in zip(keys, wrote.outcomes, strict=True) if o is WriteOutcome.STORED)
            drains = wrote.draining
        else:
            arena.poison()
            read = store.read(ns, keys, arena.regions, 2.0)
            assert not set(read.outcomes) & NEVER
            for row, outcome in enumerate(read.outcomes):
                assert outcome is not Outcome.LOADED or arena.holds(row, ns.id, keys[row])
            drains = read.draining
        if drains:
            arena = HostArena(BATCH, SIZES)  # the old one belongs to the device until its drain is done
        if rng.random() < 0.1:
            drive.release(perform=rng.random() < 0.5)
    assert sum(drive.injected.values()) > 20 and stored, "the storm did not blow"
    drive.plan = FaultPlan()
    drive.release()
    arena = HostArena(BATCH, SIZES)
    for start in range(0, 60 * BATCH, BATCH):
        keys = page_keys(BATCH, start=start)
        assert all(o.is_stored for o in store.write(ns, keys, arena.fill(ns.id, keys)).outcomes), "holes do not heal"
    assert KillHarness({"path": str(tmp_path / "store")}).accounting_errors(store) == []


def test_bytes_that_were_damaged_on_their_way_are_read_again_and_the_page_stays(
    nvme: Callable[..., NvmeStore], tmp_path: Path
) -> None:
    drive = FaultyEngine(open_engine("posix", str(tmp_path)))
    store = nvme(options={"engine": drive})
    ns, keys = store.namespace(Fingerprint("flip")), page_keys(4)
    arena = HostArena(4, (262_144,))
    store.write(ns, keys[:2], arena.fill(ns.id, keys[:2]))
    drive.plan = FaultPlan(exact={3: Fault.FLIP})  # two payloads and their table came before
    arena.poison()
    assert store.read(ns, keys[:2], arena.regions.slice(0, 2)).outcomes == (Outcome.LOADED,) * 2
    assert drive.injected[Fault.FLIP] == 1 and all(arena.holds(r, ns.id, keys[r]) for r in range(2))
    counters = store.metrics.snapshot().counters
    assert counters["read_retried_pages"] == 1 and "corrupt_pages_removed" not in counters
