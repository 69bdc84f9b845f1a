"""What a start does before the first request: the page hash is ready, bounded; and a durable prefix is what it says."""

import os
import subprocess
import sys
import threading

import pytest

from sglang_hicache_ext.ports import WriteResult
from sglang_hicache_ext.sglang_adapter.page_hash import PageHashWarmUp, hash_a_page

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

KEYS = [f"{i:064x}" for i in range(1, 7)]


def test_a_start_has_used_sglangs_page_hash_before_it_returns(kit, nvme, monkeypatch):
    from sglang.srt.mem_cache import utils

    used = []
    real = utils.get_native_hash
    monkeypatch.setattr(utils, "get_native_hash", lambda *a: used.append(threading.current_thread().name) or real(*a))
    node = kit.Node(kit.Shape("mha", "page_first", 16), "nvme", nvme)
    assert used == ["hicache-page-hash"]
    node.close()


def test_a_start_does_not_wait_longer_than_it_says_and_the_warm_up_goes_on(caplog):
    compiled = threading.Event()
    warm = PageHashWarmUp(lambda: compiled.wait(60) and None)
    assert not warm.wait(0.05)
    assert "still compiles" in caplog.text
    compiled.set()
    assert warm.wait(30)
    assert (warm.problem, warm.seconds > 0) == ("", True)


def test_a_machine_without_a_compiler_is_told_at_start(caplog):
    def broken():
        raise RuntimeError("Failed to load") from OSError("g++ is not installed")

    warm = PageHashWarmUp(broken)
    assert warm.wait(30)
    assert "g++ is not installed" in warm.problem
    assert "g++ is not installed" in caplog.text


@pytest.mark.full
def test_a_fresh_machine_compiles_in_the_warm_up(tmp_path):
    code = (
        "import sys; from sglang_hicache_ext.sglang_adapter.page_hash import PageHashWarmUp, hash_a_page\n"
        "import time; first = PageHashWarmUp(); assert first.wait(280) and not first.problem, first.problem\n"
        "at = time.monotonic(); hash_a_page(); print(first.seconds, time.monotonic() - at)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.rglob("hicache_hash_cpp.so"))
    first, second = map(float, done.stdout.split()[-2:])
    assert second < first / 10
    hash_a_page()


def test_kept_for_another_try_is_not_durable(kit, nvme, monkeypatch):
    node = kit.Node(kit.Shape("mha", "page_first", 16), "nvme", nvme)
    backend, pool = node.storage, node.host_pool
    indices = torch.arange(6 * pool.page_size)
    prefix = backend.durable_prefix(KEYS)
    real, refusing = backend.store.write, [True]

    def write(ns, keys, regions, deadline_s=None):
        from sglang_hicache_ext.outcome import WriteOutcome

        if refusing:
            return WriteResult((WriteOutcome.FULL,) * len(keys))
        return real(ns, keys, regions, deadline_s)

    monkeypatch.setattr(backend.store, "write", write)
    assert backend.batch_set_v1(KEYS, indices) == [True] * 6
    assert backend.retry_pages == 6
    assert not prefix.wait(0.0)
    refusing.clear()
    assert prefix.wait(30.0)
    node.close()
