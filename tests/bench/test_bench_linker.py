"""bench_linker: bad input, and the part that needs no engine from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import bench_linker
import pytest
from harness import EXIT_BAD_INPUT, EXIT_OK, entry


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "vram"], "choose from"),
        (["--device", "cuda"], "sees no GPU"),
        (["--path", "/proc/none"], "name a directory on the drive"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert entry(bench_linker.main, ["--path", str(tmp_path), *arguments]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.slow
def test_overlap_is_held_against_its_bound_and_printed_next_to_a_synchronous_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    code = entry(
        bench_linker.main, ["--smoke", "--parts", "overlap", "--path", str(tmp_path / "w"), "--json", str(out)]
    )
    words = json.loads(out.read_text())
    assert code == EXIT_OK, words["failures"]
    assert words["summary"]["overlap_efficiency"] > 0
    assert {f"speedup_at_{r:g}" for r in bench_linker.RATIOS} < set(words["summary"])
    printed = capsys.readouterr().out
    assert printed.count("bound max(load, compute) + first layer") == len(bench_linker.RATIOS)
    assert not list((tmp_path / "w").iterdir())
