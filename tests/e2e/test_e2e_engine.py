"""A real engine starts cold and takes its prefixes from our store, with the tokens it would have computed."""

import itertools
import os

import pytest

PROMPTS, TOKENS, NEW_TOKENS = 2, 330, 6
WHOLE = (TOKENS - 1) // 64 * 64

PAIRWISE = [
    ("tiny", 2, "layer_first", "dynamic"),
    ("swa", 1, "page_first", "nvme"),
    ("mla", 2, "page_first_direct", "nvme"),
]
EVERYTHING = [
    case
    for case in itertools.product(
        ("tiny", "mla", "swa"), (1, 2), ("layer_first", "page_first", "page_first_direct"), ("nvme", "dynamic")
    )
    if case not in PAIRWISE
]


def runs(models_dir, tmp_path, kind, tp, layout, backend, names, **env):
    """Run the same prompts once per name on one store; "recompute" has none."""
    import engine_kit

    found = {}
    for name in names:
        arguments = engine_kit.engine_arguments(models_dir(kind), tp_size=tp)
        if name != "recompute":
            extra = {"path": str(tmp_path / "store"), "capacity": "256MiB", "prefetch_threshold": 64}
            arguments |= engine_kit.storage_arguments(backend, layout, extra)
        job = {
            "engine": arguments,
            "prompts": PROMPTS,
            "tokens": TOKENS,
            "new_tokens": NEW_TOKENS,
            "expect_written_pages": PROMPTS * (TOKENS // 64) if name == "write" else 0,
        }
        cores = sorted(os.sched_getaffinity(0))
        bind = (
            {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[r % len(cores)]) for r in range(tp))} if tp > 1 else {}
        )
        found[name] = engine_kit.run_engine(job, kind, tmp_path / f"{name}.log", engine_kit.LIMIT_S, **bind, **env)
    return found


def tokens(run):
    return [a["out"] for a in run["answers"]]


def from_storage(run):
    return [a["from"].get("storage", 0) for a in run["answers"]]


def check_cold_start(models_dir, tmp_path, kind, tp, layout, backend):
    found = runs(models_dir, tmp_path, kind, tp, layout, backend, ("write", "read"))
    assert tokens(found["read"]) == tokens(found["write"])
    assert from_storage(found["write"]) == [0] * PROMPTS
    assert from_storage(found["read"]) == [WHOLE] * PROMPTS
    state = found["read"]["state"]
    assert state["disabled"] == ""
    assert state["hooks"]["problems"] == {}
    assert state["counters"].get("adapter_errors", 0) == 0
    if kind == "swa":
        assert set(state["pools"]) == {"kv", "swa"}


@pytest.mark.e2e
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("kind", "tp", "layout", "backend"), PAIRWISE)
def test_a_cold_engine_takes_every_prefix_from_storage(models_dir, tmp_path, kind, tp, layout, backend):
    check_cold_start(models_dir, tmp_path, kind, tp, layout, backend)


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("kind", "tp", "layout", "backend"), EVERYTHING)
def test_a_cold_engine_takes_every_prefix_from_storage_in_every_combination(
    models_dir, tmp_path, kind, tp, layout, backend
):
    check_cold_start(models_dir, tmp_path, kind, tp, layout, backend)


@pytest.mark.e2e
@pytest.mark.timeout(1000)
def test_injected_failures_and_delays_never_change_a_token(models_dir, tmp_path):
    arguments = (models_dir, tmp_path, "tiny", 1, "page_first", "nvme")
    found = runs(*arguments, ("write",))
    noisy = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05"}
    again = runs(*arguments, ("read",), **noisy)
    assert tokens(again["read"]) == tokens(found["write"])
