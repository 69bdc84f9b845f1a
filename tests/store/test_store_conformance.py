"""The shipped conformance suite against the memory store and the NVMe store on each engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hicache_ext.config import MIB, HiCacheExtConfig
from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.ports import PageStore
from sglang_hicache_ext.storage_backends import open_store
from sglang_hicache_ext.storage_backends.engines import open_engine
from sglang_hicache_ext.testing.conformance import CHECKS, Check, StoreUnderTest

CAPACITY = 96 * MIB


def _engine_works(name: str, directory: Path) -> str:
    try:
        open_engine(name, str(directory)).close()
    except CapabilityError as err:
        return str(err)
    return ""


@pytest.fixture(params=["memory", "posix", "io_uring", "aiofiles", "kvikio"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], PageStore]:
    kind: str = request.param
    if kind == "memory":
        return lambda: open_store(HiCacheExtConfig(capacity=CAPACITY), "memory")
    if why_not := _engine_works(kind, tmp_path):
        pytest.skip(f"{kind} does not work here: {why_not}")
    numbers = itertools.count()

    def fresh() -> PageStore:
        path = str(tmp_path / f"store{next(numbers)}")
        return open_store(HiCacheExtConfig(path=(path,), capacity=CAPACITY, segment=4 * MIB, engine=kind))

    return fresh


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_store_keeps_the_promise(make_store: Callable[[], PageStore], check: Check) -> None:
    check(StoreUnderTest(make_store, operations=2400))


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_store_keeps_the_promise_under_load(make_store: Callable[[], PageStore], check: Check) -> None:
    check(StoreUnderTest(make_store, operations=40_000))
