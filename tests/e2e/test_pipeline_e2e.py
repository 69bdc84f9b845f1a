"""The engine with our prefetch pipeline: the tokens of a run without cache, and at least SGLang's own storage hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PROMPTS, TOKENS, NEW_TOKENS = 2, 330, 6
WHOLE = (TOKENS - 1) // 64 * 64
HERE = Path(__file__).resolve().parent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def run(
    models_dir: Any, tmp_path: Path, name: str, kind: str, tp: int, extra: dict[str, Any] | None, **options: Any
) -> Any:
    """One engine on the store of ``tmp_path``; without ``extra`` it has no cache."""
    import engine_kit

    arguments = engine_kit.engine_arguments(models_dir(kind), tp_size=tp)
    if extra is not None:
        extra = {"path": str(tmp_path / "store"), "capacity": "256MiB", "prefetch_threshold": 64, **extra}
        arguments |= engine_kit.storage_arguments("dynamic", "page_first_direct", extra)
        arguments |= options
    job = {
        "engine": arguments,
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "new_tokens": NEW_TOKENS,
        "expect_written_pages": PROMPTS * (TOKENS // 64) if name == "write" else 0,
    }
    env = {"PYTHONPATH": f"{engine_kit.HERE / 'site'}:{HERE / 'faults_site'}"}
    if tp > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * tp)
    return engine_kit.run_engine(job, kind, tmp_path / f"{name}.log", engine_kit.LIMIT_S, **env)


def tokens(found: Any) -> list[Any]:
    return [a["out"] for a in found["answers"]]


def hits(found: Any) -> int:
    return sum(a["from"].get("storage", 0) for a in found["answers"])


def ours(policy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(extra config, engine arguments) of our pipeline under ``policy``."""
    if policy == "deadline":
        return {"pipeline": "extension", "prefetch_policy": "deadline", "prefill_tokens_per_s": 20.0}, {}
    return {"pipeline": "extension"}, {"hicache_storage_prefetch_policy": policy}


def check(models_dir: Any, tmp_path: Path, kind: str, tp: int, policies: list[str]) -> None:
    expected = tokens(run(models_dir, tmp_path, "without", kind, tp, None))
    assert tokens(run(models_dir, tmp_path, "write", kind, tp, {})) == expected
    own = run(models_dir, tmp_path, "own", kind, tp, {})
    assert tokens(own) == expected
    for policy in policies:
        extra, options = ours(policy)
        found = run(models_dir, tmp_path, policy, kind, tp, extra, **options)
        assert tokens(found) == expected, policy
        assert found["state"]["counters"]["prefetch_submitted"] >= PROMPTS, policy
        assert found["state"]["disabled"] == ""
        if policy != "best_effort":
            assert hits(found) >= hits(own) == PROMPTS * WHOLE, policy


@pytest.mark.parametrize(
    ("kind", "tp", "policies"),
    [("tiny", 1, ["best_effort", "deadline"]), ("mla", 2, ["wait_complete"])],
    ids=["tp1", "mla-tp2"],
)
def test_the_engine_gives_the_tokens_of_a_run_without_cache(
    models_dir: Any, tmp_path: Path, kind: str, tp: int, policies: list[str]
) -> None:
    check(models_dir, tmp_path, kind, tp, policies)


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["tiny", "mla"])
def test_the_engine_gives_the_tokens_of_a_run_without_cache_under_every_policy(
    models_dir: Any, tmp_path: Path, kind: str, tp: int
) -> None:
    check(models_dir, tmp_path, kind, tp, ["best_effort", "timeout", "wait_complete", "deadline"])


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 2])
def test_over_a_faulty_store_the_tokens_are_the_same(models_dir: Any, tmp_path: Path, tp: int) -> None:
    expected = tokens(run(models_dir, tmp_path, "write", "tiny", tp, {}))
    extra, options = ours("wait_complete")
    faulty = {"module_path": "faulty_backend", "class_name": "FaultyBackend", **extra}
    found = run(models_dir, tmp_path, "faulty", "tiny", tp, faulty, **options)
    assert tokens(found) == expected
    assert found["state"]["counters"]["prefetch_submitted"] >= PROMPTS
    assert hits(found) < PROMPTS * WHOLE, "no fault ever struck"
