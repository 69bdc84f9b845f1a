"""bench_storage: a smoke run, and that it refuses to be fooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_storage
import numpy as np
import pytest
from harness import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, EXIT_WARM, Arena, Arm, Run, entry
from measure.facts import mount_of
from storage_bench import bandwidth
from storage_bench.drive import Bench, Callers
from storage_bench.ours import Ours
from storage_bench.shape import KIB, MIB, Batch, Case
from storage_bench.verdict import GOALS

CASE = Case("read", 64 * KIB, "shuffled", 1, 4 * MIB)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if mount_of(tmp_path).get("file_system") in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("needs a file system on a block device")
    return tmp_path


def _measure(disk: Path, contestant: Any, arena: Arena, case: Case = CASE) -> Run:
    run = Run("bench_storage", disk, seed=1)
    bench = Bench(contestant, case, arena, str(disk), Callers(case.threads))
    bench.fill()
    run.measure(case.name, [Arm("ours", bench.read, is_required=True)], rounds=1, warm_up=0)
    contestant.close()
    return run


def _ours(disk: Path, kind: type[Ours] = Ours) -> tuple[Ours, Arena]:
    arena = Arena(CASE.pages, CASE.page_bytes)
    return kind(str(disk / "store"), arena, "posix", 64 * MIB), arena


def test_a_right_and_cold_store_passes_with_proof(disk: Path) -> None:
    run = _measure(disk, *_ours(disk))
    assert run.exit_code == EXIT_OK, run.failures
    facts = run.samples[0].facts
    assert facts["bytes_asked"] == CASE.sample_bytes
    assert facts["bytes_from_device"] >= CASE.sample_bytes


def test_several_callers_read_every_page_once(disk: Path) -> None:
    case = Case("read", 64 * KIB, "shuffled", 3, 32 * MIB)
    arena = Arena(case.pages, case.page_bytes)
    run = _measure(disk, Ours(str(disk / "store"), arena, "posix", 128 * MIB), arena, case)
    assert run.exit_code == EXIT_OK, run.failures
    assert len(run.samples[0].series["batch_ms"]) == 4


class _SwapsTwoPages(Ours):
    def read(self, batch: Batch) -> None:
        super().read(batch)
        if len(batch) > 1:
            halves = self._arena.halves[:, batch.start : batch.start + 2]
            halves[:] = halves[:, ::-1].copy()


class _FlipsABit(Ours):
    def read(self, batch: Batch) -> None:
        super().read(batch)
        self._arena.halves[1, batch.start, 1234] ^= 1


class _ReadsNothing(Ours):
    def read(self, batch: Batch) -> None:
        pass


class _ReadsOnlyOnce(Ours):
    """Serves from memory: right bytes, but nothing comes from the device."""

    def write(self, batch: Batch) -> None:
        super().write(batch)
        self.kept = getattr(self, "kept", {})
        for i, key in enumerate(batch.keys):
            self.kept[key] = self._arena.halves[:, batch.start + i].copy()

    def read(self, batch: Batch) -> None:
        for i, key in enumerate(batch.keys):
            self._arena.halves[:, batch.start + i] = self.kept[key]


@pytest.mark.parametrize("kind", [_SwapsTwoPages, _FlipsABit, _ReadsNothing])
def test_wrong_bytes_void_the_run(disk: Path, kind: type[Ours]) -> None:
    run = _measure(disk, *_ours(disk, kind))
    assert run.exit_code == EXIT_FAILED
    assert "wrong bytes" in run.failures[0]
    assert not run.samples, "no figure of a wrong read may stand"


def test_bytes_that_did_not_come_from_the_device_are_called_warm(disk: Path) -> None:
    run = _measure(disk, *_ours(disk, _ReadsOnlyOnce))
    assert run.exit_code == EXIT_WARM
    assert "not a cold read" in run.failures[0]


def test_a_write_that_is_not_there_afterwards_fails(disk: Path) -> None:
    class Forgets(Ours):
        def write(self, batch: Batch) -> None:
            pass

    contestant, arena = _ours(disk, Forgets)
    case = Case("write", CASE.page_bytes, "sequential", 1, CASE.sample_bytes)
    run = Run("bench_storage", disk, seed=1)
    bench = Bench(contestant, case, arena, str(disk), Callers(1))
    run.measure(case.name, [Arm("ours", bench.write, is_required=True)], rounds=1, warm_up=0)
    contestant.close()
    assert run.exit_code == EXIT_FAILED


def test_hashing_is_put_back_after_the_arm_without_it(disk: Path) -> None:
    from storage_bench.ours import WithoutHashing

    from sglang_hicache_ext.storage_backends.record import PageDigests

    real = PageDigests.digest
    arena = Arena(CASE.pages, CASE.page_bytes)
    run = _measure(disk, WithoutHashing(str(disk / "store"), arena, "posix", 64 * MIB), arena)
    assert run.exit_code == EXIT_OK, run.failures
    assert PageDigests.digest is real


@pytest.mark.slow
def test_a_smoke_run_writes_every_figure(disk: Path) -> None:
    out = disk / "out.json"
    arms = "ours-posix,ceiling-loop"
    code = entry(bench_storage.main, ["--smoke", "--path", str(disk / "work"), "--json", str(out), "--arms", arms])
    words = json.loads(out.read_text())
    assert code == EXIT_OK, words["failures"]
    assert set(words["summary"]) == set(GOALS)
    for name in ("read_share_256k", "write_share_256k", "read_share_32k", "exists128_us", "open_clean_s",
                 "open_rebuild_s", "index_bytes_per_page", "stripe4_vs_1"):  # fmt: skip
        assert words["summary"][name] > 0, name
    assert words["summary"]["read_vs_file_256k"] is None, "an arm that did not run has no figure"
    assert words["config_effective"]["read 256k shuffled 1t"]["ours-posix"]["engine"] == "posix"
    assert any("2,000 pages" in n for n in words["notes"])
    assert not list((disk / "work").iterdir()), "scratch data is removed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "ours-spdk"], "choose from"),
        (["--sizes", "8k"], "choose from"),
        (["--threads", "9"], "choose from"),
        (["--parts", ""], "choose from"),
        (["--sample-bytes", "many"], "is not a size"),
        (["--index-pages", "9000000000"], "GiB free"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert entry(bench_storage.main, ["--path", str(tmp_path / "w"), *arguments]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_the_plan_gives_headline_sizes_every_arm_and_keeps_the_rest_short() -> None:
    plan = bandwidth.Plan("x", [], [], [], [], [], 256 * MIB, rounds=5)
    headline, other = Case("read", 256 * KIB, "shuffled", 1, 1), Case("read", MIB, "shuffled", 1, 1)
    assert plan.rounds_for(headline) == 5 and plan.rounds_for(other) == 2
    assert plan.takes_part("nixl-default", headline) and not plan.takes_part("nixl-default", other)
    assert np.prod([plan.bytes_for(s) >= 128 * s for s in (16 * KIB, 256 * KIB, 4 * MIB)])
