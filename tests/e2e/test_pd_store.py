"""Prefill and decode over one NVMe store: who starts cold takes its prefix from L3, and a promise is never more than it."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TOKENS, NEW_TOKENS = 700, 8
HERE = Path(__file__).resolve().parent
PAGE = 16
WHOLE = TOKENS // PAGE * PAGE


def prompt(seed: int) -> list[int]:
    import random

    numbers = random.Random(seed)
    return [numbers.randrange(3, 259) for _ in range(TOKENS)]


def arbiter_of(store: Path) -> str:
    """One name per test: the transfers and the store's reads share it."""
    return f"test-{zlib.crc32(str(store).encode()):08x}"


def storage(store: Path, **more: Any) -> Any:
    import engine_kit

    extra = {"path": str(store), "capacity": "256MiB", "prefetch_threshold": 64, "arbiter": arbiter_of(store), **more}
    backend = "dynamic" if "module_path" in more else "nvme"
    return engine_kit.storage_arguments(backend, "page_first", extra)


def transfers(pair: Any, role: str) -> Any:
    return pair.state(role)["hicache_ext_pd"]["counters"]


def sent_bytes(pair: Any) -> float:
    return float(transfers(pair, "prefill").get("pd_bytes_sent", 0))


def pair_over(model: str, folder: Path, store: Path, decode: Any = None, env: Any = None) -> Any:
    import pd_kit

    decode_store = storage(store) if decode is None else decode
    return pd_kit.Pair(
        model,
        "tiny",
        folder,
        prefill=storage(store),
        decode={"disaggregation_decode_enable_radix_cache": True, **decode_store},
        env=env,
    )


def wanted_of(models_dir: Any, tmp_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    import engine_kit
    import pd_kit

    with engine_kit.Server(pd_kit.base_arguments(models_dir("tiny")), "tiny", tmp_path / "one.log") as server:
        return [server.generate(ids, NEW_TOKENS)["out"] for ids in prompts]


def test_a_cold_side_takes_its_prefix_from_the_store_and_only_the_rest_from_prefill(
    models_dir: Any, tmp_path: Path
) -> None:
    prompts = [prompt(1), prompt(2)]
    wanted = wanted_of(models_dir, tmp_path, prompts)
    with pair_over(models_dir("tiny"), tmp_path, tmp_path / "store") as pair:
        assert [pair.generate(ids, NEW_TOKENS).get("out") for ids in prompts] == wanted
        whole = sent_bytes(pair)
        check_arbiter(arbiter_of(tmp_path / "store"))
        pair.servers["prefill"].wait_written(2 * (TOKENS // PAGE))
        pair.stop("decode")
        pair.start("decode")  # cold: L1 and L2 of the decode node are empty
        assert [pair.generate(ids, NEW_TOKENS).get("out") for ids in prompts] == wanted
        rest = sent_bytes(pair) - whole
        assert 0 < rest < whole / 2, "the decode node did not take its prefix from L3"
        assert transfers(pair, "decode").get("pd_promises_withdrawn", 0) == 0
        pair.stop("prefill")
        pair.start("prefill")
        fresh = pair.generate(prompts[0], NEW_TOKENS)
        assert fresh["out"] == wanted[0]
        assert fresh["prefill"]["from"].get("storage", 0) > 0, "prefill computed what L3 had"


def check_arbiter(name: str) -> None:
    """The transfers announced themselves to the arbiter of the store."""
    from sglang_hicache_ext.arbiter import Arbiter

    arbiter = Arbiter(name)
    try:
        assert arbiter.describe()["pd_took_ms"]
    finally:
        arbiter.close(remove=True)


def test_a_promise_that_cannot_be_kept_is_given_back_and_never_changes_a_token(models_dir: Any, tmp_path: Path) -> None:
    import engine_kit

    prompts = [prompt(seed) for seed in range(6)]
    wanted = wanted_of(models_dir, tmp_path, prompts)
    store = tmp_path / "store"
    faulty = storage(store, module_path="faulty_backend", class_name="FaultyBackend")
    paths = {"PYTHONPATH": f"{engine_kit.HERE / 'site'}:{HERE / 'faults_site'}"}
    with pair_over(models_dir("tiny"), tmp_path, store, faulty, {"decode": paths}) as pair:
        assert [pair.generate(ids, NEW_TOKENS).get("out") for ids in prompts] == wanted
        pair.servers["prefill"].wait_written(len(prompts) * (TOKENS // PAGE))
        pair.stop("decode")
        pair.start("decode")
        again = [pair.generate(ids, NEW_TOKENS) for ids in prompts]
        assert [a.get("out", a) for a in again] == wanted
        found = transfers(pair, "decode")
        assert found.get("pd_promises_withdrawn", 0) > 0, "every promise was kept: the store's faults never struck"


def test_what_the_decode_side_made_is_found_by_the_next_prefill(models_dir: Any, tmp_path: Path) -> None:
    """The decode server writes its own tokens to L3; the next turn of the conversation finds them on the prefill side."""
    import engine_kit
    import pd_kit

    first, more, new_tokens = prompt(3), prompt(4)[:40], 96
    with engine_kit.Server(pd_kit.base_arguments(models_dir("tiny")), "tiny", tmp_path / "one.log") as server:
        said = server.generate(first, new_tokens)["out"]
        wanted = server.generate([*first, *said, *more], NEW_TOKENS)["out"]
    store = tmp_path / "store"
    offload = {
        "disaggregation_decode_enable_offload_kvcache": True,
        **storage(store),
        "enable_hierarchical_cache": False,
    }
    with pd_kit.Pair(models_dir("tiny"), "tiny", tmp_path, prefill=storage(store), decode=offload) as pair:
        assert pair.generate(first, new_tokens)["out"] == said
        pair.servers["prefill"].wait_written(TOKENS // PAGE)
        pair.servers["decode"].wait_written(new_tokens // PAGE - 1)
        second = pair.generate([*first, *said, *more], NEW_TOKENS)
        assert second["out"] == wanted
        assert second["prefill"]["from"]["storage"] >= new_tokens // 2, "prefill computed what decode had stored"
