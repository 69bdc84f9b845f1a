"""The harness: interleaving, statistics, failed samples, JSON, report, exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from harness import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_WARM,
    Arm,
    BadInput,
    Goal,
    Measurement,
    Plot,
    Run,
    Trial,
    WarmRead,
    WrongBytes,
    choices,
    entry,
    interleave,
    parser,
    spread_of,
    writable_directory,
)


def _run(tmp_path: Path) -> Run:
    return Run("bench_test", path=tmp_path, seed=3, out=io.StringIO())


def _arm(name: str, *, figure: float = 1.0, error: Exception | None = None, is_required: bool = False) -> Arm:
    def work(trial: Trial) -> Measurement:
        if error is not None:
            raise error
        return Measurement({"gb_s": figure}, {"page_ms": [1.0, 2.0, 3.0]})

    return Arm(name, work, is_required=is_required)


def test_every_round_runs_every_arm_once_before_the_next_round_begins() -> None:
    ran: list[tuple[int, str]] = []

    def arm(name: str) -> Arm:
        def work(trial: Trial) -> Measurement:
            ran.append((trial.round, name))
            return Measurement()

        return Arm(name, work)

    list(interleave("case", [arm("a"), arm("b"), arm("c")], rounds=6, seed=1, warm_up=1))
    assert [r for r, _ in ran] == [r for r in range(-1, 6) for _ in range(3)]
    for start in range(0, len(ran), 3):
        assert {name for _, name in ran[start : start + 3]} == {"a", "b", "c"}
    assert len({tuple(n for _, n in ran[s : s + 3]) for s in range(0, len(ran), 3)}) > 1, "the order must vary"


def test_all_arms_of_a_round_get_the_same_seed_and_the_run_is_repeatable() -> None:
    def seeds(seed: int) -> list[tuple[int, float]]:
        seen: list[tuple[int, float]] = []

        def work(trial: Trial) -> Measurement:
            seen.append((trial.seed, float(trial.rng.random())))
            return Measurement()

        list(interleave("case", [Arm("a", work), Arm("b", work)], rounds=3, seed=seed, warm_up=0))
        return seen

    first = seeds(7)
    assert first[0] == first[1] and first[2] == first[3]
    assert first[0] != first[2]
    assert seeds(7) == first
    assert seeds(8) != first


def test_warm_up_rounds_leave_no_samples() -> None:
    samples = list(interleave("case", [_arm("a")], rounds=2, seed=1, warm_up=3))
    assert [s.round for s in samples] == [0, 1]


def test_a_failed_sample_is_kept_as_a_data_point(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert run.measure("case", [_arm("ours"), _arm("peer", error=OSError("no"))], rounds=2)
    row = next(r for r in run.words()["table"] if r["arm"] == "peer")
    assert row["samples"] == 2
    assert row["errors"] == ["OSError: no"] * 2
    assert run.exit_code == EXIT_OK, "a peer that fails does not void the run"


def test_a_required_arm_that_fails_fails_the_run(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.measure("case", [_arm("ours", error=OSError("no"), is_required=True)], rounds=1)
    assert run.finish() == EXIT_FAILED


def test_wrong_bytes_void_the_run_at_once(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert not run.measure("case", [_arm("ours", error=WrongBytes("page 3"))], rounds=5)
    assert run.finish() == EXIT_FAILED
    assert "page 3" in run.words()["failures"][0]


def test_a_warm_read_voids_the_run_with_its_own_exit_code(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert not run.measure("case", [_arm("ours", error=WarmRead("cached"))], rounds=5)
    assert run.finish() == EXIT_WARM


def test_ratios_are_taken_within_rounds(tmp_path: Path) -> None:
    run = _run(tmp_path)

    def drifting(factor: float) -> Arm:
        return Arm(f"x{factor}", lambda t: Measurement({"gb_s": factor * (1 + t.round)}))

    run.measure("case", [drifting(3.0), drifting(1.0)], rounds=4)
    ratio = run.ratio("case", "x3.0", "x1.0", "gb_s")
    assert ratio is not None and ratio.low == ratio.high == pytest.approx(3.0)


def test_percentiles_interpolate_and_empty_gives_none() -> None:
    spread = spread_of(range(101))
    assert spread is not None
    assert (spread.p50, spread.p90, spread.p99, spread.low, spread.high) == (50, 90, 99, 0, 100)
    assert spread_of([]) is None


def test_json_has_everything_a_reader_needs(tmp_path: Path) -> None:
    run = _run(tmp_path)
    arm = _arm("ours", figure=2.0)
    arm.requested, arm.effective = {"engine": "auto"}, lambda: {"engine": "posix"}
    run.measure("case", [arm], rounds=3)
    run.conclude("share", run.spread("case", "ours", "gb_s"), Goal(">=", 3.0, "a goal"))
    run.conclude("missing", None, Goal("<=", 1.0, "never measured"))
    target = tmp_path / "sub" / "out.json"
    assert run.finish(str(target)) == EXIT_OK
    words = json.loads(target.read_text())
    assert words["schema"] == 1 and words["benchmark"] == "bench_test" and words["seed"] == 3
    assert len(words["commit"]) == 40 and isinstance(words["is_dirty"], bool)
    assert words["versions"]["python"] and words["hardware"]["cpu"] and words["hardware"]["cores"] > 0
    assert words["file_system"]["file_system"] and words["file_system"]["options"]
    assert words["date"].endswith("+00:00") and words["command"]
    assert words["config_requested"]["arms"]["ours"] == {"engine": "auto"}
    assert words["config_effective"]["case"]["ours"] == {"engine": "posix"}
    assert words["summary"] == {"share": 2.0, "missing": None}
    assert words["goals"]["share"]["is_reached"] is False
    assert words["goals"]["missing"]["is_reached"] is None
    assert [s["values"] for s in words["samples"]] == [{"gb_s": 2.0}] * 3
    assert words["samples"][0]["series"]["page_ms"] == [1.0, 2.0, 3.0]
    metrics = words["table"][0]["metrics"]["page_ms"]
    assert set(metrics) == {"n", "p50", "p90", "p99", "min", "max", "spread"} and metrics["n"] == 9


def test_a_smoke_run_is_not_judged(tmp_path: Path) -> None:
    run = Run("bench_test", path=tmp_path, is_smoke=True, out=io.StringIO())
    run.conclude("share", 0.1, Goal(">=", 0.9, "a goal"))
    assert run.words()["goals"]["share"]["is_reached"] is None
    assert "not judged" in run.text(run.words()) and "MISSED" not in run.text(run.words())


def test_the_report_is_one_self_contained_page_and_plots_are_png(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.measure("256 KiB <read>", [_arm("ours"), _arm("peer", error=OSError("no"))], rounds=1)
    run.conclude("share", 0.5, Goal(">=", 0.9, "a goal"))
    run.plots.append(Plot("Bars", "page", "GB/s", {"ours": [(0, 1.0, 0.9, 1.2)]}, ticks=["16 KiB"]))
    run.plots.append(Plot("Lines", "tokens", "ms", {"ours": [(1, 2, 1, 3), (2, 3, 3, 3)]}, is_log_x=True))
    report, plots = tmp_path / "r.html", tmp_path / "plots"
    run.finish(report_file=str(report), plots_dir=str(plots))
    page = report.read_text()
    assert page.count("<svg") == 2
    assert "missed" in page and "OSError: no" in page
    assert "256 KiB &lt;read&gt;" in page
    assert "src=" not in page and "<link" not in page and "@import" not in page
    images = sorted(plots.iterdir())
    assert [p.suffix for p in images] == [".png", ".png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in images)


def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main(_argv: object) -> int:
        raise BadInput("--url http://x: not SGLang")

    assert entry(main) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == "error: --url http://x: not SGLang\n"


def test_options_refuse_what_they_do_not_know(tmp_path: Path) -> None:
    assert choices("a, b", ("a", "b", "c"), "--arms") == ["a", "b"]
    for bad in ("a,z", ""):
        with pytest.raises(BadInput, match="choose from a, b, c"):
            choices(bad, ("a", "b", "c"), "--arms")
    with pytest.raises(SystemExit) as stopped:
        parser("x", 3).parse_args(["--rounds", "0"])
    assert stopped.value.code == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="name a directory"):
        writable_directory(str(tmp_path / "file"), "--path")
