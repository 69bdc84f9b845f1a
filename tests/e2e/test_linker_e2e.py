"""A real server with the direct linker: two starts on one directory, then damage on disk, and never another token."""

import os
import random
import shutil
import urllib.error

import pytest

PROMPTS, TOKENS = 3, 330
PAGES = TOKENS // 64
WHOLE = PAGES * 64


def prompt(index):
    """The same in every run."""
    generator = random.Random(index)
    return [generator.randrange(3, 259) for _ in range(TOKENS)]


def server(model, tmp_path, kind, tp, name):
    import engine_kit

    config = {"path": str(tmp_path / "store"), "capacity": "256MiB"}
    arguments = engine_kit.engine_arguments(str(model), tp_size=tp) | engine_kit.linker_arguments(config)
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


def from_store(answer):
    """Tokens that came through the linker; SGLang calls them "host"."""
    return answer["from"].get("host", 0)


def answers(running):
    return [running.generate(prompt(i)) for i in range(PROMPTS)]


def check(models_dir, tmp_path, kind, tp):
    with server(models_dir(kind), tmp_path, kind, tp, "write") as first:
        computed = answers(first)
        assert [from_store(a) for a in computed] == [0] * PROMPTS
        first.wait_written(PROMPTS * PAGES)
    with server(models_dir(kind), tmp_path, kind, tp, "read") as second:
        loaded = answers(second)
        assert [from_store(a) for a in loaded] == [WHOLE] * PROMPTS
        assert [a["out"] for a in loaded] == [a["out"] for a in computed]
        state = second.state()
        assert state["backend"] == "linker" and state["path"] == "direct" and state["disabled"] == ""
        assert state["hooks"]["problems"] == {}
        assert state["counters"].get("adapter_errors", 0) == 0
        check_damage(second, tmp_path / "store", [a["out"] for a in computed], is_shared=kind == "mla" and tp > 1)


def check_damage(running, store, expected, is_shared):
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
    found = running.state()["read_outcomes"]
    # ranks that share the page both find it wrong: the first one removes it, to the other it is then gone
    assert found.get("corrupt", 0) + (found.get("evicted", 0) if is_shared else 0) == 1
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


def update(running, model, **how):
    assert running.control("POST", "/update_weights_from_disk", {"model_path": str(model), **how})["success"]


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_new_weights_never_meet_pages_of_the_old_ones(models_dir, tmp_path):
    """v1 is stored; an update to v2 finds nothing of it; back on v1 its pages are found, those in between are not."""
    import models

    v1 = shutil.copytree(models_dir("tiny"), tmp_path / "v1")
    v2 = shutil.copytree(v1, tmp_path / "v2")
    models.write_weights("tiny", str(v2), seed=1)
    with server(v1, tmp_path, "tiny", 1, "first") as running:
        old = running.generate(prompt(0))
        running.wait_written(PAGES)
        update(running, v2)
        new = running.generate(prompt(0))
        assert from_store(new) == 0
        assert new["out"] != old["out"]
        running.wait_written(2 * PAGES)
        assert running.state()["weight_epoch"] == ""  # the files name the weights
        update(running, v1, flush_cache=False)
        assert running.state()["weight_epoch"].endswith("-unflushed")  # SGLang still serves KV of v2
        running.generate(prompt(1))
        running.wait_written(3 * PAGES)
        running.control("POST", "/flush_cache")
        again = running.generate(prompt(0))
        assert (from_store(again), again["out"]) == (WHOLE, old["out"])
        assert from_store(running.generate(prompt(1))) == 0
    with server(v2, tmp_path, "tiny", 1, "second") as running:
        restarted = running.generate(prompt(0))
        assert (from_store(restarted), restarted["out"]) == (WHOLE, new["out"])
