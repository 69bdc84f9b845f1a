"""Every command of the documentation runs here, or it is said why it cannot; names of paths and models are put in its place."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_hicache_ext.cli.main import app
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint, hash_chain, key_bytes
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
CODE = re.compile(r"```(?:bash|sh|console)?\n(.*?)```|((?:^ {4}\S.*\n(?:^ {4,}.*\n)*)+)", re.S | re.M)
TOKENS = list(range(640))
NEEDS_A_CLUSTER = {"warm"}
SLOW_HERE = {"bench": ["--total", "16MiB"]}
"""Put behind a command's own options, so that it takes a second and not minutes."""


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command line in code blocks, continued lines joined."""
    for page in PAGES:
        for fenced, indented in CODE.findall(page.read_text()):
            for text in lines_of(fenced or indented):
                if re.match(rf"{program}(\s|$)", text):
                    yield page.name, shlex.split(text, comments=True)


def lines_of(block: str) -> Iterator[str]:
    """Command lines; one goes on after a backslash and inside quotes."""
    waiting = ""
    for line in block.splitlines():
        waiting += line.strip().removeprefix("$ ").removesuffix("\\") + " "
        if not line.rstrip().endswith("\\") and waiting.count("'") % 2 == 0:
            yield waiting.strip()
            waiting = ""


def named(found: Any) -> list[Any]:
    return [pytest.param(page, words, id=f"{page}: {' '.join(words)[:60]}") for page, words in found]


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """What the documentation's names stand for: a store with one prompt, a model, the prompt."""
    drive, model = tmp_path / "nvme0", tmp_path / "my-model"
    for folder in (drive, model, tmp_path / "nvme1/kv"):
        folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "nvme1").chmod(0o700)
    (tmp_path / "nvme1/kv").chmod(0o700)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    (model / "config.json").write_text(json.dumps(shape))
    (tmp_path / "prompt.txt").write_text(" ".join(map(str, TOKENS)))
    store = NvmeStore(HiCacheExtConfig(path=(str(drive / "kv"),), capacity=256 << 20))
    ns = store.namespace(Fingerprint(model="my-model", page_tokens=64))
    keys = [key_bytes(k) for k in hash_chain(TOKENS, 64)]
    store.write(ns, keys, regions_of_array(np.zeros((len(keys), 8192), np.uint8)))
    store.close()
    (drive / "linker").mkdir(mode=0o700)
    return {
        "/mnt/nvme0": str(drive), "/mnt/nvme1": str(tmp_path / "nvme1"), "/models/my-model": str(model), "MODEL": str(model),
        "prompt.txt": str(tmp_path / "prompt.txt"), "hot.hx": str(tmp_path / "hot.hx"), "69b7b301": ns.id.hex()[:8],
    }  # fmt: skip


def put_in_place(words: list[str], place: dict[str, str]) -> list[str]:
    out = []
    for word in words:
        for name, stands_for in place.items():
            if word == name or word.startswith(name + "/"):
                word = stands_for + word[len(name) :]  # noqa: PLW2901
        out.append(word)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("page", "words"), named(commands("hicache-ext")))
def test_every_hicache_ext_command_runs(page: str, words: list[str], place: dict[str, str]) -> None:
    verb = words[1]
    if verb in NEEDS_A_CLUSTER:
        pytest.skip("needs a remote tier; tests/remote/test_warm.py runs it on one")
    if "--text" in words:
        pytest.skip("needs a tokenizer; the same command runs with --tokens-file")
    args = put_in_place(words[1:], place) + SLOW_HERE.get(verb, [])
    if verb == "wait":
        args += ["--timeout", "1"]
    if verb == "import":
        assert CliRunner().invoke(app, ["export", place["hot.hx"], place["/mnt/nvme0"] + "/kv"]).exit_code == 0
    done = CliRunner().invoke(app, args)
    said = f"{page}: {' '.join(words)} -> {done.exit_code}\n{done.output}"
    assert done.exception is None or isinstance(done.exception, SystemExit), said
    assert done.exit_code in ((0, 1, 3) if verb == "doctor" else (0, 1)), said  # a doctor may find what is wrong here


@lru_cache
def help_of(script: str) -> str:
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{script}: {done.stderr[-1000:]}"
    return done.stdout


@pytest.mark.slow
def test_scripts_named_in_the_docs_know_their_options() -> None:
    found = [(p, w) for p, w in commands("python3?") if len(w) > 1 and w[1].endswith(".py")]
    assert len(found) > 10
    for page, words in found:
        text = help_of(words[1])
        for flag in [w.split("=")[0] for w in words[2:] if w.startswith("--")]:
            assert re.search(rf"{flag}\b", text), f"{page}: {' '.join(words)}: no {flag}"


def test_tests_named_in_the_docs_exist() -> None:
    markers = (ROOT / "pyproject.toml").read_text()
    for page, words in commands("pytest"):
        for at, word in enumerate(words[1:], 1):
            if word.startswith("tests"):
                assert (ROOT / word).exists(), f"{page}: {' '.join(words)}"
            if words[at - 1] == "-m" and word.isalpha():
                assert f'"{word}: ' in markers, f"{page}: {' '.join(words)}"


@pytest.mark.slow
def test_sglang_accepts_every_launch_line() -> None:
    """By SGLang's own parser, after our plugin made its names legal; the model is not opened."""
    pytest.importorskip("sglang")
    code = (
        "import json, sys, warnings; warnings.simplefilter('ignore')\n"
        "import cpu_kit; cpu_kit.install()\n"
        "from sglang_hicache_ext.sglang_adapter import plugin; plugin.register()\n"
        "assert set(plugin.health.values()) == {'ok'}, plugin.health\n"
        "import argparse; from sglang.srt.server_args import ServerArgs\n"
        "for page, words in json.load(sys.stdin):\n"
        "    parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser)\n"
        "    try: parser.parse_args(words)\n"
        "    except SystemExit: sys.exit(f'{page}: {words}')\n"
    )
    lines = [
        (
            page,
            [
                "M" if before == "--model-path" else w
                for before, w in pairwise(words[2:])
                if w != "..." or before == "--model-path"
            ],
        )
        for page, words in commands("python3?")
        if words[1:3] == ["-m", "sglang.launch_server"]
    ]
    assert len(lines) > 5
    whole = [(page, words if "--model-path" in words else ["--model-path", "M", *words]) for page, words in lines]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests/sglang_cpu/site")}  # what SGLang imports and a CPU lacks
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(whole),
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1500:]


def test_json_in_launch_lines_is_json() -> None:
    parser = argparse.ArgumentParser()
    flags = ("--hicache-storage-backend-extra-config", "--kv-events-config", "--unified-cache-external-linker-config")
    for flag in flags:
        parser.add_argument(flag)
    found = 0
    for page, words in commands("python3?"):
        if words[1:3] != ["-m", "sglang.launch_server"]:
            continue
        for value in vars(parser.parse_known_args(words[3:])[0]).values():
            if value and not value.startswith("@"):
                found += 1
                assert isinstance(json.loads(value), dict), page
    assert found > 4
