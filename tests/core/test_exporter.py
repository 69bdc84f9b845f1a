"""The exported series: names, sums, no double counting, and that a second attach goes on with the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest

from sglang_hicache_ext.exporter import GAUGES, PREFIXES, Exporter, Reading, series_names
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome, WriteOutcome

LABELS = {"storage_backend": "nvme", "tp_rank": "0", "tier": ""}


@pytest.fixture
def registry() -> Iterator[Any]:
    yield prometheus_client.CollectorRegistry()
    Exporter._made.clear()


def _value(registry: Any, name: str, **labels: str) -> float | None:
    value: float | None = registry.get_sample_value(PREFIXES[0] + name, {**LABELS, **labels})
    return value


def test_counters_advance_by_what_changed_and_parts_are_added_up(registry: Any) -> None:
    store, adapter, exporter = Metrics(), Metrics(), Exporter(LABELS, registry=registry)
    store.pages([Outcome.LOADED] * 3 + [Outcome.CORRUPT])
    store.writes([WriteOutcome.STORED])
    store.add("read_bytes", 100)
    store.add("reclaimed_pages", 2)
    adapter.add("reclaimed_pages", 1)
    for _ in range(3):
        exporter.publish(Reading((store.snapshot(), adapter.snapshot())))
    store.pages([Outcome.LOADED])
    exporter.publish(Reading((store.snapshot(), adapter.snapshot())))
    assert _value(registry, "hicache_ext_pages_total", outcome="loaded") == 4
    assert _value(registry, "hicache_ext_pages_total", outcome="corrupt") == 1
    assert _value(registry, "hicache_ext_page_writes_total", outcome="stored") == 1
    assert _value(registry, "hicache_ext_bytes_total", direction="read") == 100
    assert _value(registry, "hicache_ext_events_total", event="reclaimed_pages") == 3


def test_histogram_values_come_through_the_sink_once(registry: Any) -> None:
    metrics, exporter = Metrics(), Exporter(LABELS, registry=registry)
    metrics.attach(exporter.observe)
    metrics.observe("read_batch_seconds", 0.02)
    metrics.observe("something_else", 0.02)
    assert _value(registry, "hicache_ext_batch_seconds_count", operation="read") == 1
    assert _value(registry, "hicache_ext_batch_seconds_bucket", operation="read", le="0.025") == 1
    assert _value(registry, "hicache_ext_batch_seconds_bucket", operation="read", le="0.01") == 0
    metrics.detach(exporter.observe)
    metrics.observe("read_batch_seconds", 0.02)
    assert _value(registry, "hicache_ext_batch_seconds_count", operation="read") == 1


def test_gauges_and_the_path(registry: Any) -> None:
    path = {"engine_requested": "auto", "engine": "posix", "direct": "True", "durability": "process"}
    Exporter(LABELS, registry=registry).publish(Reading((), {"hicache_ext_used_bytes": 5.0}, path))
    assert _value(registry, "hicache_ext_used_bytes") == 5
    assert _value(registry, "hicache_ext_path_info", **path) == 1


def test_every_sample_in_a_scrape_is_in_the_table(registry: Any) -> None:
    metrics, exporter = Metrics(), Exporter(LABELS, registry=registry)
    metrics.attach(exporter.observe)
    metrics.observe("write_batch_seconds", 1.0)
    metrics.pages([Outcome.LATE])
    metrics.writes([WriteOutcome.FULL])
    metrics.add("written_bytes", 1)
    metrics.add("index_full", 1)
    exporter.publish(Reading((metrics.snapshot(),), dict.fromkeys(set(GAUGES) - {"hicache_ext_path_info"}, 1.0)))
    seen = {s.name for family in registry.collect() for s in family.samples if not s.name.endswith("_created")}
    assert seen <= series_names()
    assert len(seen) == 15


def test_a_backend_attached_again_goes_on_with_the_same_series(registry: Any) -> None:
    for _ in range(2):
        metrics = Metrics()
        metrics.pages([Outcome.LOADED])
        Exporter(LABELS, registry=registry).publish(Reading((metrics.snapshot(),)))
    assert _value(registry, "hicache_ext_pages_total", outcome="loaded") == 2


def test_a_tier_has_series_of_its_own_and_the_whole_store_is_the_default(registry: Any) -> None:
    whole, near = Metrics(), Metrics()
    whole.pages([Outcome.LOADED] * 5)
    near.pages([Outcome.LOADED] * 3)
    Exporter({"storage_backend": "nvme", "tp_rank": "0"}, registry=registry).publish(Reading((whole.snapshot(),)))
    Exporter({**LABELS, "tier": "near"}, registry=registry).publish(Reading((near.snapshot(),)))
    assert _value(registry, "hicache_ext_pages_total", outcome="loaded") == 5
    assert _value(registry, "hicache_ext_pages_total", outcome="loaded", tier="near") == 3


def test_both_prefixes_name_the_same_series() -> None:
    assert {n.removeprefix("sglang:") for n in series_names()} == {
        n.removeprefix("sglang_") for n in series_names("sglang_")
    }
