"""The dashboard's own expressions, evaluated over real series of the exporter: none is empty, none is misunderstood."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from sglang_hicache_ext.exporter import GAUGES, PREFIXES, Exporter, Reading
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome, WriteOutcome

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "scripts"))

from promql import Query, Series  # noqa: E402

PANELS = json.loads((ROOT / "docs/grafana/hicache-ext.json").read_text())["panels"]
LABELS = {"storage_backend": "nvme", "tp_rank": "0", "tier": ""}


@pytest.fixture(params=PREFIXES)
def series(request: pytest.FixtureRequest) -> Iterator[Series]:
    """Two scrapes, ten seconds apart: 30 of 40 pages loaded, batches of 20 ms."""
    registry, metrics, series = prometheus_client.CollectorRegistry(), Metrics(), Series()
    exporter = Exporter(LABELS, prefix=request.param, registry=registry)
    near = Exporter({**LABELS, "tier": "near"}, prefix=request.param, registry=registry)
    metrics.attach(exporter.observe)
    gauges = dict.fromkeys(set(GAUGES) - {"hicache_ext_path_info"}, 3.0)
    path = {"engine_requested": "auto", "engine": "io_uring", "direct": "True", "durability": "process"}
    for at in (0.0, 10.0):
        metrics.pages([Outcome.LOADED] * 30 + [Outcome.ABSENT] * 10)
        metrics.writes([WriteOutcome.STORED] * 20)
        metrics.add("read_bytes", 1000)
        metrics.add("reclaimed_pages", 5)
        metrics.observe("read_batch_seconds", 0.02)
        exporter.publish(Reading((metrics.snapshot(),), gauges, path))
        near.publish(Reading((metrics.snapshot(),), gauges, path))
        series.add(at, [(s.name, s.labels, s.value) for f in registry.collect() for s in f.samples])
    yield series
    Exporter._made.clear()


def value_of(title: str, series: Series) -> dict[str, float]:
    (panel,) = [p for p in PANELS if p["title"] == title]
    (target,) = panel["targets"]
    found = Query(target["expr"], 60.0).at(series, 10.0)
    return {",".join(v for _, v in sorted(labels)): value for labels, value in found.items()}


def test_panels_say_what_their_titles_promise(series: Series) -> None:
    assert value_of("Share of queried pages that were loaded", series) == {"": 0.75}
    assert value_of("Queried pages by outcome", series) == {"loaded": 3.0, "absent": 1.0}
    assert value_of("Pages of each tier by outcome", series) == {"loaded,near": 3.0, "absent,near": 1.0}
    assert value_of("Written pages by outcome", series) == {"stored": 2.0}
    assert value_of("Payload moved", series) == {"read": 100.0}
    assert value_of("Events", series) == {"reclaimed_pages": 0.5}
    assert len(value_of("Used and capacity", series)) == 2
    assert len(value_of("Host pages withheld, writes to retry", series)) == 2
    assert 0.01 < value_of("Batch latency p99", series)["read"] <= 0.025


@pytest.mark.parametrize("panel", PANELS, ids=lambda p: str(p["title"]))
def test_every_expression_finds_its_series(panel: dict[str, Any], series: Series) -> None:
    for target in panel["targets"]:
        assert Query(target["expr"], 60.0).at(series, 10.0)


def test_or_drops_what_has_the_same_labels_under_another_name(series: Series) -> None:
    (name,) = {n for labels in series.rows for k, n in labels if k == "__name__" and n.endswith("used_bytes")}
    other = name.replace("used", "capacity")
    found = Query(f'{{__name__="{name}",tier=""}} or {{__name__="{other}",tier=""}}', 60.0).at(series, 10.0)
    assert [dict(labels)["__name__"] for labels in found] == [name]


def test_what_is_not_promql_is_refused() -> None:
    with pytest.raises(ValueError, match="not understood"):
        Query('sum({a="b"}) * 2', 60.0)
