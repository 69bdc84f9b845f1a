"""Draw the dashboard of docs/grafana from real data: the series of a real backend, scraped twice a second while it works.

python scripts/dashboard_picture.py [--seconds 40] [--out docs/plots/dashboard.png]

SGLang's controller, host pool and our NVMe store run on the CPU: pages are written until reclaim begins, read back, asked for
in vain, and a few are damaged on the drive. The panels and their expressions are those of the JSON file; the drawing is
ours, since no Grafana is needed to run this.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from promql import Query, Series, Vector

ROOT = Path(__file__).resolve().parent.parent
WINDOW_S, SCRAPE_S, PAGE_TOKENS, BATCH = 5.0, 0.5, 16, 8


def scrape(seconds: float, path: str) -> Series:
    """Work for ``seconds`` and return what was exported meanwhile."""
    sys.path[:0] = [str(ROOT / "tests/sglang_cpu"), str(ROOT / "tests/sglang_cpu/site")]
    warnings.simplefilter("ignore")
    import cpu_kit

    cpu_kit.install()
    import controller_kit
    import prometheus_client

    from sglang_hicache_ext.sglang_adapter import hooks, plugin
    from sglang_hicache_ext.sglang_adapter.exporting import BackendExport

    plugin.register()
    hooks.ensure_installed()
    controller_kit.start()
    node = controller_kit.Node(
        controller_kit.Shape("mha", "page_first", PAGE_TOKENS), "nvme", {"path": path, "capacity": "96MiB"}
    )
    registry = prometheus_client.CollectorRegistry()
    export = BackendExport(node.storage, {"storage_backend": "nvme", "tp_rank": "0"}, registry=registry)
    series, work, started = Series(), Work(node, Path(path)), time.monotonic()
    next_scrape = 0.0
    while (now := time.monotonic() - started) < seconds:
        work.step(now / seconds)
        export.tick()
        if now >= next_scrape:
            export.wait(5)
            series.add(now, [(s.name, s.labels, s.value) for f in registry.collect() for s in f.samples])
            next_scrape = now + SCRAPE_S
    export.close()
    node.close()
    return series


class Work:
    """Batches of pages through the backend's own zero-copy calls."""

    def __init__(self, node: Any, path: Path) -> None:
        import torch

        self._storage, self._path = node.storage, path
        self._indices = torch.arange(BATCH * PAGE_TOKENS)
        self._dice = random.Random(1)
        self._keys: list[str] = []
        self._damaged = False

    def step(self, progress: float) -> None:
        """A little more of what the phase does: write, then read too, then ask for what is not there as well."""
        if progress < 0.2 or self._dice.random() < 0.3:
            new = [f"{self._dice.getrandbits(256):064x}" for _ in range(BATCH)]
            self._storage.batch_set_v1(new, self._indices)
            self._keys += new
        if progress > 0.15:
            self._storage.batch_get_v1(self._dice.sample(self._keys[-4000:], BATCH), self._indices)
        if progress > 0.6 and self._dice.random() < 0.2:
            self._storage.batch_get_v1([f"{self._dice.getrandbits(256):064x}" for _ in range(BATCH)], self._indices)
        if progress > 0.75 and not self._damaged:
            self._damaged = True
            self._damage()
        time.sleep(0.01)

    def _damage(self) -> None:
        """A stripe of every segment file goes bad."""
        for segment in (self._path / "segments").iterdir():
            with segment.open("r+b") as file:
                file.seek(segment.stat().st_size // 3)
                file.write(b"\xff" * 300_000)


def draw(series: Series, dashboard: dict[str, Any], seconds: float, out: Path) -> None:
    """Every panel where the dashboard has it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = dashboard["panels"]
    rows = 1 + max(p["gridPos"]["y"] // 8 for p in panels)
    figure, axes = plt.subplots(rows, 3, figsize=(16, 2.7 * rows), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for panel in panels:
        place = panel["gridPos"]
        axis = axes[place["y"] // 8][place["x"] // 8]
        axis.set_axis_on()
        _panel(axis, panel, series, seconds)
    figure.suptitle(
        f"{dashboard['title']}: panels of docs/grafana/hicache-ext.json, drawn with matplotlib from a real run of "
        f"{seconds:.0f} s on a CPU (rates over {WINDOW_S:.0f} s)", fontsize=10,
    )  # fmt: skip
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=70)


def _panel(axis: Any, panel: dict[str, Any], series: Series, seconds: float) -> None:
    (target,) = panel["targets"]
    lines = evaluate(target["expr"], series, seconds)
    scale, unit = {"bytes": (1 / (1 << 20), "MiB"), "Bps": (1e-6, "MB/s"), "s": (1e3, "ms"), "percentunit": (100, "%")}.get(
        panel["fieldConfig"]["defaults"]["unit"], (1.0, "")
    )  # fmt: skip
    for labels, (times, values) in sorted(lines.items()):
        axis.plot(
            times, [scale * v for v in values], label=_legend(target["legendFormat"], dict(labels)), linewidth=1.2
        )
    axis.set_title(f"{panel['title']}{f', {unit}' if unit else ''}", fontsize=9, loc="left")
    axis.tick_params(labelsize=7)
    axis.set_xlim(0, seconds)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if lines:
        axis.legend(fontsize=6, loc="upper left", ncols=2 if len(lines) > 6 else 1)


Lines = dict[tuple[tuple[str, str], ...], tuple[list[float], list[float]]]


def evaluate(expression: str, series: Series, seconds: float) -> Lines:
    """A line for each vector element, once a scrape."""
    query, lines = Query(expression, WINDOW_S), {}
    steps = int(seconds / SCRAPE_S)
    for at in (SCRAPE_S * i for i in range(1, steps + 1)):
        vector: Vector = query.at(series, at)
        for labels, value in vector.items():
            times, values = lines.setdefault(tuple(sorted(labels)), ([], []))
            times.append(at)
            values.append(value)
    return lines


def _legend(text: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text or "value"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of the run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/plots/dashboard.png", help="PNG to write")
    args = parser.parse_args(argv)
    dashboard = json.loads((ROOT / "docs/grafana/hicache-ext.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        series = scrape(args.seconds, f"{scratch}/store")
    draw(series, dashboard, args.seconds, args.out)
    print(f"{args.out}: {len(dashboard['panels'])} panels, {len(series.rows)} series")
    return 0


if __name__ == "__main__":
    sys.exit(main())
