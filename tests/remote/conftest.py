from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore

HERE = str(Path(__file__).parent)
FAKE = "fake_engine:FakeEngine"
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def fake_store() -> Iterator[Callable[..., RemoteStore]]:
    """Makes stores over FakeEngine; as threads of the test unless in_process=False."""
    made: list[RemoteStore] = []

    def make(in_process: bool = True, clock: Any = None, **config: Any) -> RemoteStore:
        raw = {"master": "127.0.0.1:1", "staging": 1 << 20, "remote_lanes": 2, "remote_deadline_s": 0.25, **config}
        store = RemoteStore(
            HiCacheExtConfig.parse(raw), engine=FAKE, engine_path=(HERE,), in_process=in_process, clock=clock
        )
        made.append(store)
        return store

    yield make
    for store in made:
        engine = getattr(store._link.client._worker, "engine", None)
        if engine is not None:
            engine.resume.set()
        store.close()


@pytest.fixture(scope="session")
def needs_mooncake() -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("the mooncake package is not installed (requirements/remote.txt)")


@pytest.fixture(scope="session")
def shared_cluster(needs_mooncake: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One healthy master and node for tests that break nothing."""
    with LocalCluster(tmp_path_factory.mktemp("cluster"), node_bytes=256 << 20) as cluster:
        yield cluster


@pytest.fixture
def own_cluster(needs_mooncake: None, tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    """Makes clusters to break; every process ends with the test."""
    made: list[LocalCluster] = []

    def make(**options: Any) -> LocalCluster:
        cluster = LocalCluster(tmp_path / f"cluster{len(made)}", **options)
        made.append(cluster)
        return cluster.__enter__()

    yield make
    for cluster in made:
        cluster.stop()


@pytest.fixture
def remote_store() -> Iterator[Callable[..., RemoteStore]]:
    """Makes real stores for a cluster; closed with the test."""
    made: list[RemoteStore] = []

    def make(cluster: LocalCluster, **config: Any) -> RemoteStore:
        raw = {"master": cluster.master_address, "staging": 64 << 20, **config}
        made.append(RemoteStore(HiCacheExtConfig.parse(raw)))
        return made[-1]

    yield make
    for store in made:
        store.close()


class Pages:
    """``count`` random pages with keys, and a target of the same shape that starts as 0x5a."""

    def __init__(self, count: int, nbytes: int = 4096, seed: int = 0, model: str = "m") -> None:
        from sglang_hicache_ext.page import regions_of_array

        rng = np.random.default_rng(seed)
        self.data = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
        self.target = np.full_like(self.data, 0x5A)
        self.keys = [rng.bytes(32) for _ in range(count)]
        self.fingerprint = Fingerprint(model)
        self.source_regions = regions_of_array(self.data)
        self.target_regions = regions_of_array(self.target)

    @property
    def is_target_untouched(self) -> bool:
        return bool((self.target == 0x5A).all())


@pytest.fixture
def pages() -> Callable[..., Pages]:
    return Pages
