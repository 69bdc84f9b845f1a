"""Reading a trace: every kind of bad input is one message that names line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulator.trace import Request, hit_rate_infinite, read_trace

from sglang_hicache_ext.errors import ConfigError

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def row(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def without(field: str) -> str:
    return json.dumps({k: v for k, v in GOOD.items() if k != field})


BAD = {
    "missing time stamp": ([without("timestamp")], "line 1, field 'timestamp'"),
    "missing length": ([row(), without("input_length")], "line 2, field 'input_length'"),
    "missing output": ([without("output_length")], "line 1, field 'output_length'"),
    "missing ids": ([without("hash_ids")], "line 1, field 'hash_ids'"),
    "goes back in time": ([row(timestamp=9), row(timestamp=8)], "line 2, field 'timestamp'"),
    "negative length": ([row(input_length=-1)], "input_length is negative"),
    "negative output": ([row(output_length=-3)], "output_length is negative"),
    "negative time": ([row(timestamp=-1)], "timestamp is negative"),
    "not a number": ([row(timestamp="soon")], "timestamp is 'soon'"),
    "infinite": (['{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": [1]}'], "timestamp is inf"),
    "truth value": ([row(input_length=True)], "input_length is True"),
    "fraction of a token": ([row(input_length=1.5)], "input_length is 1.5"),
    "ids are text": ([row(hash_ids=["a", "b"])], "field 'hash_ids'"),
    "too few ids": ([row(hash_ids=[1])], "write 2, one per 512 tokens"),
    "empty": ([], "the trace is empty"),
    "blank lines only": (["", "  "], "the trace is empty"),
    "not JSON": (["timestamp,input_length"], "line 1"),
    "cut off": ([row(), row()[:20]], "line 2"),
    "a list": (["[1, 2]"], "a list, not an object"),
}


def write(path: Path, lines: list[str]) -> Path:
    file = path / "trace.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(tmp_path: Path, name: str) -> None:
    lines, message = BAD[name]
    with pytest.raises(ConfigError) as caught:
        read_trace(write(tmp_path, lines))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [".", "nothing"])
def test_a_path_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / name)


def test_a_good_trace_is_read_with_its_checksum(tmp_path: Path) -> None:
    load = read_trace(write(tmp_path, [row(), row(timestamp=3000, hash_ids=[1, 7])]))
    assert load.requests == (Request(0.0, 600, 5, (1, 2)), Request(3.0, 600, 5, (1, 7)))
    assert "sha256:" in load.source
    assert hit_rate_infinite(load.requests) == 0.25


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not JSON"):
        read_trace(tmp_path / "t")
