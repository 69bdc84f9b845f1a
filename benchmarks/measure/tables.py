"""Plain-text and HTML tables of the aggregated rows: medians with their spread."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def columns_of(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """The metrics to show: those asked for that exist, or all."""
    present = dict.fromkeys(name for row in rows for name in row["metrics"])
    return [c for c in columns if c in present] if columns else list(present)


def cell(metrics: Mapping[str, Mapping[str, float]], name: str) -> str:
    """``p50 [min..max]``, and ``p50/p99`` where there are many observations."""
    m = metrics.get(name)
    if m is None:
        return "-"
    if m["n"] > 50:
        return f"{m['p50']:.3g}/{m['p99']:.3g}"
    if m["n"] == 1:
        return f"{m['p50']:.3g}"
    return f"{m['p50']:.3g} [{m['min']:.3g}..{m['max']:.3g}]"


def grid(rows: Sequence[Row], columns: Sequence[str]) -> list[list[str]]:
    """Header and cells as text."""
    names = columns_of(rows, columns)
    lines = [["case", "arm", "n", "failed", *names]]
    for row in rows:
        own = [cell(row["metrics"], n) for n in names]
        lines.append([row["case"], row["arm"], str(row["samples"]), str(len(row["errors"])), *own])
    return lines


def text_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = grid(rows, columns)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    errors = [f"failed: {row['case']}, {row['arm']}: {e}" for row in rows for e in sorted(set(row["errors"]))]
    return "\n".join([text, *errors])


def html_table(lines: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """``lines[0]`` is the header; ``classes[i]`` is the CSS class of body row i."""
    head = "".join(f"<th>{html.escape(c)}</th>" for c in lines[0])
    body = []
    for i, line in enumerate(lines[1:]):
        mark = f' class="{classes[i]}"' if i < len(classes) and classes[i] else ""
        body.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
