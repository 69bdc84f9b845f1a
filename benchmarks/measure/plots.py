"""Plots of a run, drawn by matplotlib as SVG (in the report) and PNG (beside it)."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure.samples import BadInput

Point = tuple[float, float, float, float]
"""(x, middle, low, high)."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over x, or grouped bars when ``ticks`` names the x positions 0, 1, 2...

    Attributes:
        title: says what is seen, not what is drawn.
        x_label, y_label: with units.
        series: legend -> points; low and high become the error bar.
        ticks: names of the x positions; makes it a bar chart.
        is_log_x, is_log_y: logarithmic axes.
        level: a horizontal line (a goal, a ceiling) and its legend.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    ticks: Sequence[str] = ()
    is_log_x: bool = False
    is_log_y: bool = False
    level: tuple[float, str] | None = None
    names: Mapping[float, str] = field(default_factory=dict)


def _figure(plot: Plot) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise BadInput("plots need matplotlib: pip install 'sglang-hicache-ext[bench]'") from exc
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    axes = figure.subplots()
    (_bars if plot.ticks else _lines)(axes, plot)
    if plot.level is not None:
        axes.axhline(plot.level[0], color="0.3", linestyle="--", linewidth=1, label=plot.level[1])
    axes.set_title(plot.title, loc="left", fontsize=11)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.is_log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _errors(points: Sequence[Point]) -> list[list[float]]:
    return [[max(0.0, p[1] - p[2]) for p in points], [max(0.0, p[3] - p[1]) for p in points]]


def _bars(axes: Any, plot: Plot) -> None:
    width = 0.8 / max(1, len(plot.series))
    for i, (name, points) in enumerate(plot.series.items()):
        x = [p[0] - 0.4 + (i + 0.5) * width for p in points]
        axes.bar(x, [p[1] for p in points], width, yerr=_errors(points), label=name, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(plot.ticks)), plot.ticks)


def _lines(axes: Any, plot: Plot) -> None:
    for name, points in plot.series.items():
        x = [p[0] for p in points]
        axes.errorbar(x, [p[1] for p in points], _errors(points), label=name, marker="o", markersize=3, capsize=2)
    if plot.is_log_x:
        axes.set_xscale("log", base=2)
        xs = sorted({p[0] for points in plot.series.values() for p in points})
        axes.set_xticks(xs, [plot.names.get(x, f"{x:g}") for x in xs])
        axes.minorticks_off()


def svg(plot: Plot) -> str:
    """The plot as an inline ``<svg>`` element."""
    buffer = io.StringIO()
    _figure(plot).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def write_pngs(plots: Sequence[Plot], name: str, directory: str) -> list[Path]:
    """One PNG per plot in ``directory``."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, plot in enumerate(plots):
        slug = re.sub(r"[^a-z0-9]+", "-", plot.title.lower()).strip("-")[:60]
        paths.append(folder / f"{name}-{i + 1}-{slug}.png")
        _figure(plot).savefig(paths[-1], dpi=120)
    return paths
