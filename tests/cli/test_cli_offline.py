"""The command on a real store: what it prints, what it changes, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_hicache_ext.cli.main import app
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint, hash_chain, key_bytes
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

PAGE_TOKENS, PAGE_BYTES, PAGES = 16, 16_384, 60
PRINT = Fingerprint(model="demo", page_tokens=PAGE_TOKENS, dtype="torch.bfloat16", layout="page_first")
TOKENS = list(range(PAGE_TOKENS * PAGES))
KEYS = [key_bytes(k) for k in hash_chain(TOKENS, PAGE_TOKENS)]


def _open(path: Path) -> NvmeStore:
    return NvmeStore(HiCacheExtConfig(path=(str(path),), capacity=128 << 20, engine="posix"))


def _payload() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(5).integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    store = _open(path)
    result = store.write(store.namespace(PRINT), KEYS, regions_of_array(_payload(), (PAGE_BYTES // 2,) * 2))
    assert all(o.is_stored for o in result.outcomes)
    store.close()
    return path


def run(*args: object) -> tuple[int, Any, str]:
    """(exit code, JSON document or None, everything said on stderr)."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    document = json.loads(result.stdout) if "--json" in args and result.stdout else None
    return result.exit_code, document, result.stderr


def _read_back(path: Path) -> tuple[list[Outcome], np.ndarray[Any, np.dtype[np.uint8]]]:
    store, memory = _open(path), np.zeros((PAGES, PAGE_BYTES), np.uint8)
    outcomes = store.read(store.namespace(PRINT), KEYS, regions_of_array(memory)).outcomes
    store.close()
    return list(outcomes), memory


def _flip_payload_bytes(path: Path, pages: int) -> None:
    """Damage the payload of ``pages`` pages where they lie."""
    wanted = _payload()[:pages, :64]
    for segment in (path / "segments").iterdir():
        raw = segment.read_bytes()
        with segment.open("r+b") as file:
            for page in wanted:
                at = raw.find(page.tobytes())
                if at >= 0:
                    file.seek(at)
                    file.write(bytes([raw[at] ^ 0xFF]))


def test_inspect_counts_what_is_there_and_names_the_fingerprint(store_path: Path) -> None:
    code, doc, _ = run("inspect", store_path, "--json")
    assert code == 0
    assert doc["pages"] == PAGES
    (found,) = doc["namespaces"]
    assert (found["pages"], found["payload_bytes"]) == (PAGES, PAGES * PAGE_BYTES)
    assert found["fingerprint"]["model"] == "demo"
    assert found["read_pages"] == 0
    _read_back(store_path)
    assert run("inspect", store_path, "--json")[1]["namespaces"][0]["read_pages"] == PAGES


def test_the_table_for_people_shows_the_same_number(store_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(store_path)])
    assert f"{PAGES} pages" in result.stdout
    assert "model=demo" in result.stdout


def test_verify_finds_nothing_in_a_good_store(store_path: Path) -> None:
    code, doc, _ = run("verify", store_path, "--json")
    assert (code, doc) == (0, {"checked_pages": PAGES, "outcomes": {"loaded": PAGES}})


def test_verify_drops_corrupt_pages_and_says_so_with_its_exit_code(store_path: Path) -> None:
    _flip_payload_bytes(store_path, 3)
    code, doc, _ = run("verify", store_path, "--json")
    assert code == 1
    assert doc["outcomes"] == {"loaded": PAGES - 3, "corrupt": 3}
    assert run("inspect", store_path, "--json")[1]["pages"] == PAGES - 3
    assert run("verify", store_path, "--json")[0] == 0


def test_checking_and_exporting_do_not_make_pages_look_wanted(store_path: Path, tmp_path: Path) -> None:
    run("verify", store_path)
    run("export", tmp_path / "a.hx", store_path)
    assert run("inspect", store_path, "--json")[1]["namespaces"][0]["read_pages"] == 0


def test_verify_takes_a_seeded_sample(store_path: Path) -> None:
    counts = {
        run("verify", store_path, "--sample", "0.3", "--seed", "1", "--json")[1]["checked_pages"] for _ in range(2)
    }
    assert len(counts) == 1
    assert 0 < counts.pop() < PAGES


def test_gc_only_plans_until_it_is_told_to_apply(store_path: Path) -> None:
    code, doc, _ = run("gc", store_path, "--namespace", "demo", "--json")
    assert (code, doc["applied"], doc["removed_pages"], doc["plan"][0]["pages"]) == (0, False, 0, PAGES)
    assert run("inspect", store_path, "--json")[1]["pages"] == PAGES
    assert run("gc", store_path, "--namespace", "demo", "--apply", "--json")[1]["removed_pages"] == PAGES
    assert run("inspect", store_path, "--json")[1]["pages"] == 0


def test_gc_by_age_looks_at_when_a_segment_was_last_written(store_path: Path) -> None:
    assert run("gc", store_path, "--older-than", "1h", "--json")[1]["plan"][0]["pages"] == 0
    for segment in (store_path / "segments").iterdir():
        os.utime(segment, (1, 1))
    assert run("gc", store_path, "--older-than", "1h", "--json")[1]["plan"][0]["pages"] == PAGES


def test_gc_by_size_keeps_what_fits(store_path: Path) -> None:
    _, doc, _ = run("gc", store_path, "--keep", str(20 * PAGE_BYTES), "--apply", "--json")
    assert doc["removed_pages"] == PAGES - 20
    assert run("inspect", store_path, "--json")[1]["pages"] == 20


def test_explain_gives_each_page_one_outcome_and_names_the_hole(store_path: Path) -> None:
    store = _open(store_path)
    store.remove(store.namespace(PRINT), KEYS[40:41])
    store.close()
    code, doc, _ = run("explain", store_path, "--tokens", json.dumps([*TOKENS, 1, 2, 3]), "--json")
    (told,) = doc["namespaces"]
    assert code == 0
    assert told["served_pages"] == 40
    assert [(r["pages"], r["outcome"]) for r in told["runs"]] == [
        ("0-39", "loaded"),
        ("40", "absent"),
        ("41-59", "hole"),
    ]
    assert sum(r["count"] for r in told["runs"]) == told["pages"] == PAGES


def test_explain_says_when_a_hit_is_below_the_threshold(store_path: Path) -> None:
    code, doc, _ = run("explain", store_path, "--tokens", json.dumps(TOKENS[:160]), "--json")
    assert code == 1
    assert doc["namespaces"][0]["runs"][0]["outcome"] == "below_threshold"
    assert run("explain", store_path, "--tokens", "1 2 3", "--json")[1]["namespaces"][0]["pages"] == 0


def test_pages_survive_export_and_import_byte_for_byte(store_path: Path, tmp_path: Path) -> None:
    archive, other = tmp_path / "a.hx", tmp_path / "other"
    assert run("export", archive, store_path, "--json")[1]["outcomes"] == {"exported": PAGES}
    _open(other).close()
    assert run("import", archive, other, "--json")[:2][1]["outcomes"] == {"stored": PAGES}
    outcomes, memory = _read_back(other)
    assert outcomes == [Outcome.LOADED] * PAGES
    assert (memory == _payload()).all()
    assert run("import", archive, other, "--json")[1]["outcomes"] == {"present": PAGES}


def test_export_can_choose_the_pages_of_one_prompt(store_path: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.hx"
    doc = run("export", archive, store_path, "--tokens", json.dumps(TOKENS[:160]), "--json")[1]
    assert doc["outcomes"] == {"exported": 10}
    assert run("export", archive, store_path)[0] == 2  # never overwrites


@pytest.mark.parametrize("where", ["payload", "header", "middle_cut", "tail_cut"])
def test_a_corrupted_archive_is_refused_page_by_page(store_path: Path, tmp_path: Path, where: str) -> None:
    archive, other = tmp_path / "a.hx", tmp_path / "other"
    run("export", archive, store_path)
    raw = bytearray(archive.read_bytes())
    second = raw.find(b"HXpg", raw.find(b"HXpg") + 1)
    if where == "payload":
        raw[second + 500] ^= 1
    elif where == "header":
        raw[second + 20] ^= 1
    elif where == "middle_cut":
        del raw[second + 200 : second + 900]
    else:
        del raw[-5000:]
    archive.write_bytes(raw)
    _open(other).close()
    code, doc, _ = run("import", archive, other, "--json")
    assert code == 1
    assert doc["outcomes"]["stored"] == PAGES - 1
    outcomes, memory = _read_back(other)
    good = [i for i, o in enumerate(outcomes) if o is Outcome.LOADED]
    assert len(good) == PAGES - 1
    assert (memory[good] == _payload()[good]).all()


def test_bad_input_is_one_line_and_changes_nothing(store_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("hello")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "store.json").write_text('{"product": "another"}')
    newer = tmp_path / "newer"
    newer.mkdir()
    head = json.loads((store_path / "store.json").read_text())
    (newer / "store.json").write_text(json.dumps({**head, "format": 99}))
    cases: list[tuple[object, ...]] = [
        ("inspect", tmp_path / "missing"), ("inspect", file), ("inspect", tmp_path), ("inspect", foreign),
        ("inspect", newer), ("inspect", store_path, "--namespace", "nothing-like-it"), ("gc", store_path),
        ("gc", store_path, "--older-than", "yesterday"), ("gc", store_path, "--keep", "lots"),
        ("explain", store_path), ("explain", store_path, "--tokens", "a b"), ("explain", store_path, "--text", "hi"),
        ("import", file, store_path), ("import", tmp_path / "missing", store_path),
        ("launch", tmp_path, "/mnt/x"), ("warm", "melt", "--config", file), ("bench", file), ("bench", tmp_path, "--page", "1"),
    ]  # fmt: skip
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for case in cases:
        code, _, said = run(*case)
        assert code == 2, case
        assert said.strip().startswith("hicache-ext: ") and "->" in said, (case, said)
        assert len(said.strip().splitlines()) == 1
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("verb", ["inspect", "verify", "gc"])
def test_a_missing_permission_is_one_line_and_changes_nothing(verb: str) -> None:
    """As another user: the store belongs to somebody else, whichever tool looks at it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kv"
        _open(path).close()
        os.chmod(folder, 0o755)
        before = sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*"))
        options = ["--older-than", "1h"] if verb == "gc" else []
        code = (
            "import contextlib, io, os, sys; from sglang_hicache_ext.cli import gc, inspect, main, verify\n"
            "def run(*args): sys.argv[1:] = args; main.main()\n"
            "with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()): run('inspect', '/nowhere')\n"
            "os.setuid(65534); run(*sys.argv_of_test)"
        ).replace("sys.argv_of_test", repr((verb, str(path), *options)))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in (2, 3), done.stderr
        assert done.stderr.startswith("hicache-ext: ") and len(done.stderr.splitlines()) == 1, done.stderr
        assert sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*")) == before


def test_launch_prints_a_line_that_our_own_config_accepts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096})
    )
    code, doc, _ = run("launch", tmp_path, tmp_path / "kv", "--tp", "2", "--json")
    assert code == 0
    words = doc["command"]
    raw = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    assert HiCacheExtConfig.parse(raw).path == (str(tmp_path / "kv"),)
    assert doc["page_bytes"] == 64 * 32 * 4 * 256 * 2


@pytest.mark.slow
def test_bench_checks_its_bytes_and_gives_one_verdict(tmp_path: Path) -> None:
    code, doc, _ = run("bench", tmp_path, "--page", "64KiB", "--total", "16MiB", "--json")
    assert code == 0
    assert (doc["wrong_pages"], doc["refused_pages"], doc["pages"]) == (0, 0, 256)
    assert "GB/s" in doc["verdict"]
    assert list(tmp_path.iterdir()) == []
