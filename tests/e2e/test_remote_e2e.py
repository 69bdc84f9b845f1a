"""A real engine with the rdma and tiered backends against a real mooncake_master: one node writes, a fresh one loads."""

import importlib.util

import pytest

from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster

PROMPTS, TOKENS, NEW_TOKENS = 2, 330, 6
PAGES = TOKENS // 64
WHOLE = (TOKENS - 1) // 64 * 64

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("the mooncake package is not installed (requirements/remote.txt)")
    with LocalCluster(tmp_path_factory.mktemp("cluster"), node_bytes=256 << 20) as started:
        yield started


@pytest.fixture
def engine(models_dir, tmp_path):
    """Runs the prompts on an engine with a backend; ``node`` names the folder of its NVMe store."""
    import engine_kit

    def run(backend, node, extra, written=0, layout="page_first"):
        options = {"path": str(tmp_path / node), "capacity": "256MiB", "prefetch_threshold": 64, **extra}
        job = {
            "engine": engine_kit.engine_arguments(models_dir("tiny"))
            | engine_kit.storage_arguments(backend, layout, options),
            "prompts": PROMPTS,
            "tokens": TOKENS,
            "new_tokens": NEW_TOKENS,
            "expect_written_pages": written,
        }
        return engine_kit.run_engine(job, "tiny", tmp_path / f"{backend}-{node}.log", engine_kit.LIMIT_S)

    return run


def outputs(run):
    return [a["out"] for a in run["answers"]]


def from_storage(run):
    return [a["from"].get("storage", 0) for a in run["answers"]]


@pytest.mark.parametrize("backend", ["rdma", "tiered"])
def test_a_fresh_node_takes_every_prefix_from_the_pool_with_the_same_tokens(backend, cluster, engine):
    extra = {"master": cluster.master_address, "staging": "64MiB", "namespace": backend}
    wrote = engine(backend, "first", extra, written=PROMPTS * PAGES)
    loaded = engine(backend, "fresh", extra)
    assert from_storage(wrote) == [0] * PROMPTS
    assert from_storage(loaded) == [WHOLE] * PROMPTS
    assert outputs(loaded) == outputs(wrote)
    assert loaded["state"]["disabled"] == "" and loaded["state"]["counters"].get("adapter_errors", 0) == 0


def test_an_engine_starts_and_answers_without_the_pool_when_told_to_degrade(engine):
    from sglang_hicache_ext.storage_backends.remote.cluster import free_port

    extra = {"master": f"127.0.0.1:{free_port()}", "staging": "64MiB", "on_unavailable": "degrade"}
    run = engine("rdma", "alone", extra)
    assert from_storage(run) == [0] * PROMPTS
    assert all(len(out) == NEW_TOKENS for out in outputs(run))
