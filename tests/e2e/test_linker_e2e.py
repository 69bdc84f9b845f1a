"""A real server with the direct linker: two starts on one directory, then damage on disk, and never another token."""

import json
import os
import random
import urllib.error

import pytest

PROMPTS, TOKENS = 3, 330
PAGES = TOKENS // 64
WHOLE = PAGES * 64

LINKER = {"linker": "NvmeLinker", "linker_module_path": "sglang_hicache_ext.sglang_adapter.linker"}


def prompt(index):
    """The same in every run."""
    generator = random.Random(index)
    return [generator.randrange(3, 259) for _ in range(TOKENS)]


def server(models_dir, tmp_path, kind, tp, name, **extra):
    import engine_kit

    config = {"path": str(tmp_path / "store"), "capacity": "256MiB", **extra}
    arguments = engine_kit.engine_arguments(
        models_dir(kind),
        tp_size=tp,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=json.dumps({**LINKER, "linker_extra_config": config}),
    )
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp)} if tp > 1 else {}
    return engine_kit.Server(arguments, kind, tmp_path / f"{name}.log", **bind)


def flip_one_page(store):
    """Change a byte in the middle of the first page that holds data; the index and all tables stay as they are."""
    for name in sorted(os.listdir(store / "segments")):
        with open(store / "segments" / name, "r+b") as f:
            raw = f.read()
            at = raw.find(b"HXlayer\x01")
            if at >= 0:
                f.seek(at + 4096 + 5000)  # behind the header: layer 0
                f.write(bytes([raw[at + 4096 + 5000] ^ 0x40]))
                return
    raise AssertionError("no layered page on disk")


def answers(running):
    return [running.generate(prompt(i)) for i in range(PROMPTS)]


def check(models_dir, tmp_path, kind, tp):
    with server(models_dir, tmp_path, kind, tp, "write") as first:
        computed = answers(first)
        assert all(not a["from"].get("host") for a in computed)
        first.wait_written(PROMPTS * PAGES)
    with server(models_dir, tmp_path, kind, tp, "read") as second:
        loaded = answers(second)
        assert [a["from"].get("host", 0) for a in loaded] == [WHOLE] * PROMPTS  # SGLang calls a linker's pages "host"
        assert [a["out"] for a in loaded] == [a["out"] for a in computed]
        state = second.state()
        assert state["backend"] == "linker" and state["path"] == "direct" and state["disabled"] == ""
        assert state["hooks"]["problems"] == {}
        assert state["counters"].get("adapter_errors", 0) == 0
        check_damage(second, tmp_path / "store", [a["out"] for a in computed])


def check_damage(running, store, expected):
    """One flipped byte: its request is aborted, the others and the next try have the right tokens."""
    running.control("POST", "/flush_cache")
    flip_one_page(store)
    aborted = 0
    for index in range(PROMPTS):
        try:
            assert running.generate(prompt(index))["out"] == expected[index]
        except urllib.error.HTTPError as error:
            assert error.code == 503
            aborted += 1
    assert aborted == 1
    assert running.state()["read_outcomes"]["corrupt"] == 1
    again = answers(running)
    assert [a["out"] for a in again] == expected


@pytest.mark.e2e
@pytest.mark.timeout(1000)
def test_prefixes_come_through_the_linker_and_damage_never_changes_a_token(models_dir, tmp_path):
    check(models_dir, tmp_path, "tiny", 1)


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("kind", "tp"), [("tiny", 2), ("mla", 1), ("mla", 2), ("swa", 1)])
def test_prefixes_come_through_the_linker_for_other_pools_and_two_ranks(models_dir, tmp_path, kind, tp):
    check(models_dir, tmp_path, kind, tp)
