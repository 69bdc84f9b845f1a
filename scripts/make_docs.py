"""Write the pages that follow from the code: docs/configuration.md, docs/metrics.md and the Grafana dashboard.

python scripts/make_docs.py           writes them
python scripts/make_docs.py --check   exits 1 when one of them is out of date
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.exporter import BASE_LABELS, COUNTERS, GAUGES, HISTOGRAMS, PATH_LABELS
from sglang_hicache_ext.outcome import Outcome, WriteOutcome

ROOT = Path(__file__).resolve().parent.parent / "docs"
_NAME = "sglang[:_]{}"
"""Both prefixes: SGLang 0.5.23 exports `sglang:`, newer builds `sglang_`."""

WHOLE = 'tier=""'
"""The whole store; with a tiered one each tier has series of its own, which must not be added to it."""

_TIERS = 'tier=~".+"'

_COUNTED = re.compile(r'metrics\.add\(\s*(f?)"([a-z0-9_]+(?:\{[^"]*\})?[a-z0-9_]*)"')


def configuration() -> str:
    """The configuration reference."""
    lines = [
        "# Configuration",
        "",
        "Generated from the config tree (`python scripts/make_docs.py`). The keys stand, flat, beside SGLang's own in",
        "`--hicache-storage-backend-extra-config` (JSON, or `@file`). An unknown key is refused with the nearest known one,",
        'values are never coerced, sizes are bytes or text like `"64GiB"`.',
        "",
        "| key | default | values | meaning |",
        "|---|---|---|---|",
    ]
    for f in dataclasses.fields(HiCacheExtConfig):
        if f.metadata["kind"] != "internal":
            lines.append(f"| `{f.name}` | {_default(f)} | {_values(f.metadata)} | {f.metadata['doc']} |")
    return "\n".join(lines) + "\n"


def _default(f: Any) -> str:
    value = f.default
    if f.metadata["kind"] == "size" and value:
        return f"`{value >> 30}GiB`" if value >= 1 << 30 else f"`{value >> 20}MiB`"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def _values(meta: Any) -> str:
    if meta["allowed"]:
        return ", ".join(f'`"{a}"`' for a in meta["allowed"])
    if meta["low"] is not None:
        return f"{meta['kind']}, {meta['low']:g} to {meta['high']:g}"
    return str({"paths": "directory, or list of them", "str": "text"}.get(meta["kind"], meta["kind"]))


def metrics() -> str:
    """The metrics reference."""
    lines = [
        "# Metrics",
        "",
        "Generated from the code (`python scripts/make_docs.py`). Exported by each rank when SGLang runs with",
        "`--enable-metrics`, with SGLang's prefix (`sglang:` in 0.5.23, `sglang_` in newer builds) and the labels",
        f"{', '.join(f'`{b}`' for b in BASE_LABELS)}. SGLang's own storage series go on beside them.",
        'The whole store has `tier=""`; a tiered store has the same series for `near` and `far` beside it: never add them up.',
        "Reads that move pages between the tiers count in theirs.",
        "",
        "| series | type | own labels | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{n}` | counter | `{label}` | {text} |" for n, (label, text) in COUNTERS.items()]
    for name, text in GAUGES.items():
        labels = ", ".join(f"`{p}`" for p in PATH_LABELS) if name == "hicache_ext_path_info" else ""
        lines.append(f"| `{name}` | gauge | {labels} | {text} |")
    lines += [f"| `{n}` | histogram | `{label}` | {text} |" for n, (label, text) in HISTOGRAMS.items()]
    lines += ["", "`outcome` of a queried page: " + ", ".join(f"`{o}`" for o in Outcome) + "."]
    lines += ["", "`outcome` of a written page: " + ", ".join(f"`{o}`" for o in WriteOutcome) + "."]
    lines += ["", "`event`: " + ", ".join(f"`{e}`" for e in events()) + "."]
    lines += [
        "",
        "The dashboard `docs/grafana/hicache-ext.json` uses the default data source and works with both prefixes. Below, its",
        "panels and expressions over the series of a real backend (SGLang's controller and host pool on a CPU, our NVMe store): pages",
        "are written until reclaim begins, read back, asked for in vain, and some are damaged on the drive. Drawn with matplotlib by",
        "`python scripts/dashboard_picture.py`, not by Grafana; other programs used the same two cores. The store has no tiers, so that",
        "panel is empty.",
        "",
        "![The dashboard's panels over a real run](plots/dashboard.png)",
    ]
    return "\n".join(lines) + "\n"


def events() -> list[str]:
    """Names of every counter in the source; a part that is known at run time only stands in <>."""
    found = set()
    for folder in ("sglang_hicache_ext", "storage_backends"):
        for path in sorted((ROOT.parent / folder).rglob("*.py")):
            for prefix, name in _COUNTED.findall(path.read_text()):
                found.add(re.sub(r"\{.*\}", "<name>", name) if prefix else name)
    return sorted(found - {"read_bytes", "written_bytes"})


def dashboard() -> str:
    """The Grafana dashboard: default data source, both prefixes."""
    pages, writes = _metric("hicache_ext_pages_total"), _metric("hicache_ext_page_writes_total")
    panels = [
        ("Share of queried pages that were loaded", f'sum(rate({{{pages},outcome="loaded"}}[5m])) / sum(rate({{{pages}}}[5m]))', "loaded", "percentunit"),
        ("Queried pages by outcome", f"sum by (outcome) (rate({{{pages}}}[5m]))", "{{outcome}}", "short"),
        ("Written pages by outcome", f"sum by (outcome) (rate({{{writes}}}[5m]))", "{{outcome}}", "short"),
        ("Payload moved", f"sum by (direction) (rate({{{_metric('hicache_ext_bytes_total')}}}[5m]))", "{{direction}}", "Bps"),
        ("Batch latency p99", f"histogram_quantile(0.99, sum by (le, operation) (rate({{{_metric('hicache_ext_batch_seconds_bucket')}}}[5m])))", "{{operation}}", "s"),
        ("Used and capacity", f"sum by (__name__) ({{{_either('hicache_ext_used_bytes', 'hicache_ext_capacity_bytes')}}})", "{{__name__}}", "bytes"),
        ("Oldest call in flight", f"max by (tp_rank) ({{{_metric('hicache_ext_oldest_inflight_seconds')}}})", "rank {{tp_rank}}", "s"),
        ("Oldest prefetch in a queue", f"max by (tp_rank) ({{{_metric('hicache_ext_queue_age_seconds')}}})", "rank {{tp_rank}}", "s"),
        ("Host pages withheld, writes to retry", f"sum by (__name__) ({{{_either('hicache_ext_draining_pages', 'hicache_ext_retry_pages')}}})", "{{__name__}}", "short"),
        ("Events", f"sum by (event) (rate({{{_metric('hicache_ext_events_total')}}}[5m]))", "{{event}}", "short"),
        ("Pages stored", f"sum({{{_metric('hicache_ext_stored_pages')}}})", "pages", "short"),
        ("I/O path in use", f"sum by (engine_requested, engine, direct, durability) ({{{_metric('hicache_ext_path_info')}}})", "{{engine_requested}} -> {{engine}}, direct {{direct}}, {{durability}}", "short"),
        ("Pages of each tier by outcome", f"sum by (tier, outcome) (rate({{{_metric('hicache_ext_pages_total', _TIERS)}}}[5m]))", "{{tier}} {{outcome}}", "short"),
        ("Healthy", f"min by (tp_rank) ({{{_metric('hicache_ext_healthy')}}})", "rank {{tp_rank}}", "short"),
    ]  # fmt: skip
    body = {
        "title": "SGLang HiCache extension",
        "uid": "sglang-hicache-ext",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "panels": [_panel(i, *p) for i, p in enumerate(panels)],
    }
    return json.dumps(body, indent=1) + "\n"


def _metric(name: str, tier: str = WHOLE) -> str:
    return f'__name__=~"{_NAME.format(name)}",{tier}'


def _either(*names: str) -> str:
    """Matches both; `a or b` would drop b, because PromQL compares labels without the name."""
    return f'__name__=~"{"|".join(_NAME.format(n) for n in names)}",{WHOLE}'


def _panel(number: int, title: str, expression: str, legend: str, unit: str) -> dict[str, Any]:
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "gridPos": {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 8 * (number // 3)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
    }


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "grafana/hicache-ext.json": dashboard}


def main() -> int:
    """Write or check every page; returns the exit code."""
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in stale:
        print(f"docs/{name} is out of date -> python scripts/make_docs.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
