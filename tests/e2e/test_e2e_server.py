"""The HTTP server: cold start, runtime attach and detach, and weight updates, which start a new epoch."""

import json
import shutil

import pytest

PROMPT = [3 + (7 * i) % 250 for i in range(330)]
PAGES = len(PROMPT) // 64
WHOLE = (len(PROMPT) - 1) // 64 * 64


def arguments(model, store, layout="page_first"):
    import engine_kit

    extra = {"path": str(store), "capacity": "256MiB", "prefetch_threshold": 64}
    return engine_kit.engine_arguments(model) | engine_kit.storage_arguments("nvme", layout, extra)


def storage_of(answer):
    return answer["from"].get("storage", 0)


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_weights_updated_from_disk_never_meet_old_pages_and_are_found_after_a_restart(models_dir, tmp_path):
    """One server: v1 written; update to v2; nothing of v1 is used; back to v1 by update; a restart on v2 finds v2."""
    import engine_kit
    import models

    v1 = shutil.copytree(models_dir("mla"), tmp_path / "v1")
    v2 = shutil.copytree(v1, tmp_path / "v2")
    models.write_weights("mla", str(v2), seed=1)
    store = tmp_path / "store"

    with engine_kit.Server(arguments(str(v1), store), "mla", tmp_path / "first.log") as server:
        old = server.generate(PROMPT)
        server.wait_written(PAGES)
        assert server.control("POST", "/update_weights_from_disk", {"model_path": str(v2)})["success"]
        new = server.generate(PROMPT)
        assert storage_of(new) == 0
        assert new["out"] != old["out"]
        server.wait_written(2 * PAGES)
        state = server.state()
        assert state["weight_epoch"] == ""  # the files name the weights
        check_attach_and_detach(server, store, new)
        assert server.control("POST", "/update_weights_from_disk", {"model_path": str(v1)})["success"]
        again = server.generate(PROMPT)
        assert (storage_of(again), again["out"]) == (WHOLE, old["out"])

    with engine_kit.Server(arguments(str(v2), store), "mla", tmp_path / "second.log") as server:
        restarted = server.generate(PROMPT)
        assert (storage_of(restarted), restarted["out"]) == (WHOLE, new["out"])


def check_attach_and_detach(server, store, expected):
    """Detached, the server serves on; attached again by name, it finds the pages of the current weights."""
    assert server.control("DELETE", "/hicache/storage-backend")
    server.control("POST", "/flush_cache")
    assert server.state() == {}
    assert server.generate(PROMPT)["out"] == expected["out"]
    server.control("POST", "/flush_cache")
    body = {
        "hicache_storage_backend": "nvme",
        "hicache_storage_backend_extra_config_json": json.dumps(
            {"path": str(store), "capacity": "256MiB", "prefetch_threshold": 64}
        ),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    assert server.control("PUT", "/hicache/storage-backend", body)
    found = server.generate(PROMPT)
    assert (storage_of(found), found["out"]) == (WHOLE, expected["out"])
