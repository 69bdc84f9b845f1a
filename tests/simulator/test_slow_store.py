"""The slowed store: the modelled time, the deadline, and the same draws for the same pages."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.ports import PageStore
from sglang_hicache_ext.storage_backends.memory import MemoryStore
from sglang_hicache_ext.testing.latency import (
    Constant,
    HeavyTail,
    LogNormal,
    SharedBandwidth,
    Stall,
    describe,
    latency_model,
)
from sglang_hicache_ext.testing.slow_store import SlowStore


class HandClock:
    """Time passes only where the store waits."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds


KEYS = [bytes([i]) * 32 for i in range(4)]


def slowed(model: Constant, bandwidth: float = 0.0) -> tuple[SlowStore, HandClock, object, np.ndarray]:
    clock = HandClock()
    inner: PageStore = MemoryStore()
    store = SlowStore(inner, model, bandwidth, clock=clock, wait=clock.wait)
    ns = store.namespace(Fingerprint("m"))
    data = np.full((4, 512), 7, np.uint8)
    store.write(ns, KEYS, regions_of_array(data))
    return store, clock, ns, np.zeros((4, 512), np.uint8)


def test_a_read_takes_its_delay_and_its_transfer_and_brings_the_bytes() -> None:
    store, clock, ns, room = slowed(Constant(base_s=0.5), bandwidth=1024.0)
    result = store.read(ns, KEYS, regions_of_array(room))
    assert clock.time == pytest.approx(102.5)
    assert set(result.outcomes) == {Outcome.LOADED}
    assert (room == 7).all()


def test_a_read_past_its_deadline_is_late_and_returns_in_time() -> None:
    store, clock, ns, room = slowed(Constant(base_s=5.0))
    result = store.read(ns, KEYS, regions_of_array(room), deadline_s=1.0)
    assert clock.time == pytest.approx(101.0)
    assert set(result.outcomes) == {Outcome.LATE}
    assert result.late_s == pytest.approx(4.0)


def test_a_straggler_does_not_hold_the_link_while_it_waits() -> None:
    store, clock, ns, room = slowed(HeavyTail(base_s=1.0, alpha=1.0, cap_s=50.0), bandwidth=512.0)
    slow = max(range(4), key=lambda i: store._model.delay_s(int.from_bytes(KEYS[i][:8], "little"), 0.0))
    store.read(ns, [KEYS[slow]], regions_of_array(room[:1]), deadline_s=0.5)
    started = clock.time
    quick = (slow + 1) % 4
    store.read(ns, [KEYS[quick]], regions_of_array(room[:1]))
    own = store._model.delay_s(int.from_bytes(KEYS[quick][:8], "little"), 0.0)
    assert clock.time - started == pytest.approx(own + 1.0)


def test_a_miss_stays_a_miss() -> None:
    store, _, ns, room = slowed(Constant(base_s=5.0))
    assert store.read(ns, [b"x" * 32], regions_of_array(room[:1]), 1.0).outcomes == (Outcome.ABSENT,)


def test_everything_else_passes_through() -> None:
    store, clock, ns, _ = slowed(Constant(base_s=5.0))
    assert store.hit_pages(ns, KEYS) == 4
    assert store.contains(ns, KEYS).all()
    assert store.describe()["slowed"]["model"]["base_s"] == 5.0
    assert clock.time == 100.0


def test_a_draw_depends_on_seed_and_key_only() -> None:
    model = HeavyTail(seed=3)
    assert [model.delay_s(k, 0.0) for k in range(50)] == [model.delay_s(k, 9.0) for k in range(50)]
    assert model.delay_s(1, 0) != HeavyTail(seed=4).delay_s(1, 0)


def test_the_heavy_tail_has_the_tail_it_claims() -> None:
    model = HeavyTail(base_s=0.01, alpha=1.0, cap_s=10.0)
    delays = np.array([model.delay_s(k, 0.0) for k in range(20_000)])
    assert delays.min() >= 0.01
    assert delays.max() <= 10.0
    assert (delays > 0.1).mean() == pytest.approx(0.1, abs=0.01)
    assert np.median([LogNormal(base_s=0.02).delay_s(k, 0) for k in range(5000)]) == pytest.approx(0.02, rel=0.1)


def test_a_stall_ends_when_it_ends() -> None:
    model = Stall(base_s=0.0, stall_s=3.0, every_s=20.0)
    waits = [model.delay_s(0, t / 10) for t in range(200)]
    assert max(waits) == pytest.approx(3.0, abs=0.1)
    assert sum(w > 0 for w in waits) == pytest.approx(30, abs=1)


def test_a_neighbour_takes_its_share_in_turns() -> None:
    model, now, seen = SharedBandwidth(low=0.25, duty=0.4, period_s=30.0), 0.0, []
    for _ in range(4):
        seen.append(model.share(now))
        change = model.next_change_s(now)
        assert change is not None
        now = change + 1e-6
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert set(seen) == {0.25, 1.0}


@pytest.mark.parametrize("kind", ["constant", "heavy_tail", "lognormal", "stall", "shared_bandwidth"])
def test_a_model_is_rebuilt_from_its_description(kind: str) -> None:
    model = latency_model({"kind": kind, "seed": 5})
    assert latency_model(describe(model)) == model


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="heavy_tail"):
        latency_model({"kind": "slow"})
    with pytest.raises(ConfigError, match="use the fields"):
        latency_model({"kind": "constant", "speed": 3})
