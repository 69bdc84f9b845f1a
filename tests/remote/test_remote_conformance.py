"""The shared promises of every PageStore, against the remote store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_hicache_ext.storage_backends.remote.store import RemoteStore
from sglang_hicache_ext.testing import conformance
from sglang_hicache_ext.testing.conformance import CHECKS, Check, StoreUnderTest

NOT_HERE = {
    conformance.a_page_is_written_once,  # counts pages, which the pool does for all its users; tested by hand
    conformance.the_capacity_holds_at_every_instant,  # the pool's capacity is the cluster's, not the store's
}


@pytest.mark.slow
@pytest.mark.parametrize("check", [c for c in CHECKS if c not in NOT_HERE], ids=lambda c: c.__name__)
def test_the_remote_store_keeps_the_promise(check: Check, fake_store: Callable[..., RemoteStore]) -> None:
    options = {"staging": 32 << 20, "remote_lanes": 4, "remote_deadline_s": 30.0}
    check(StoreUnderTest(lambda: fake_store(**options), operations=2000))
