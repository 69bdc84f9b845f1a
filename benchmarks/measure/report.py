"""The report: one self-contained HTML page. Verdict first, then plots, then the full tables."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from measure.plots import Plot, svg
from measure.tables import grid, html_table

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1100px;padding:0 1em;color:#1c1c1c;background:#fff}
h1{font-size:1.5em;margin-bottom:.1em} h2{font-size:1.15em;margin:1.6em 0 .4em} .sub{color:#555;margin:0 0 1em}
table{border-collapse:collapse;font-size:13px} th,td{padding:.3em .7em;text-align:left;border-bottom:1px solid #ddd}
th{background:#f3f3f3;position:sticky;top:0} .wide{overflow-x:auto} svg{max-width:100%;height:auto}
tr.good td:last-child{color:#0a6b2d} tr.bad td{background:#fdecea} .void{background:#fdecea;padding:.8em;font-weight:600}
details{margin:.6em 0} pre{font-size:12px;overflow-x:auto;background:#f7f7f7;padding:.8em}
"""


def write_report(document: Mapping[str, Any], plots: Sequence[Plot], columns: Sequence[str]) -> str:
    """Return the page. Nothing is loaded from elsewhere."""
    title = f"{document['benchmark']}, {document['date'][:10]}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">{html.escape(document["device"])}. Commit {document["commit"][:12]}'
        f"{' with local changes' if document['is_dirty'] else ''}. "
        f"<code>{html.escape(document['command'])}</code></p>",
        _void(document),
        "<h2>Summary</h2>",
        _summary(document),
        *(f"<p>{html.escape(n)}</p>" for n in document["notes"]),
        *(f"<h2>{html.escape(p.title)}</h2>{svg(p)}" for p in plots),
        "<h2>All measurements: median [lowest..highest], or p50/p99 where there are many</h2>",
        f'<div class="wide">{html_table(grid(document["table"], columns))}</div>',
        _errors(document),
        _details("Configuration in use", document["config_effective"]),
        _details("Configuration asked for", document["config_requested"]),
        _details(
            "Versions, hardware, file system",
            {k: document[k] for k in ("versions", "hardware", "file_system", "seed", "is_smoke")},
        ),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _void(document: Mapping[str, Any]) -> str:
    if not document["failures"]:
        return ""
    return "".join(f'<p class="void">This run is void: {html.escape(f)}</p>' for f in document["failures"])


def _summary(document: Mapping[str, Any]) -> str:
    lines, marks = [["figure", "measured", "goal", "meaning", ""]], []
    spreads = document["extra"].get("summary_spread", {})
    for name, figure in document["summary"].items():
        goal = document["goals"].get(name)
        reached = goal["is_reached"] if goal else None
        text = "-" if figure is None else f"{figure:.4g}"
        if figure is not None and name in spreads and spreads[name]["n"] > 1:
            text += f" [{spreads[name]['min']:.3g}..{spreads[name]['max']:.3g}]"
        wanted = f"{goal['op']} {goal['value']:g}" if goal else ""
        state = {True: "reached", False: "missed", None: _unjudged(goal, figure)}[reached]
        lines.append([name, text, wanted, goal["meaning"] if goal else "", state])
        marks.append({True: "good", False: "bad", None: ""}[reached])
    return html_table(lines, marks)


def _unjudged(goal: object, figure: float | None) -> str:
    if not goal:
        return ""
    return "not measured" if figure is None else "not judged: smoke run"


def _errors(document: Mapping[str, Any]) -> str:
    errors = [f"{row['case']}, {row['arm']}: {e}" for row in document["table"] for e in sorted(set(row["errors"]))]
    if not errors:
        return ""
    return "<h2>Failed samples</h2><ul>" + "".join(f"<li>{html.escape(e)}</li>" for e in errors) + "</ul>"


def _details(title: str, value: Any) -> str:
    text = html.escape(json.dumps(value, indent=1, default=str))
    return f"<details><summary>{html.escape(title)}</summary><pre>{text}</pre></details>"
