"""Ratios in the form of the published tables, the break-even, the summary and the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import Goal, Plot, Run

from cold_start_bench.points import Point

GOALS = {
    "ttft_vs_recompute_1k": Goal("<=", 0.5, "TTFT after a restart against recompute, 1K tokens, one caller"),
    "ttft_vs_recompute_longest": Goal("<=", 0.25, "the same at the longest prefix"),
    "ttft_vs_file_max": Goal("<=", 1.0, "TTFT against SGLang's file backend, the worst point"),
}
TTFT = "ttft_ms"


def our_arm(run: Run) -> str:
    """The arm that the summary speaks of."""
    ran = list(dict.fromkeys(s.arm for s in run.samples))
    ours = [a for a in ran if a.startswith("nvme")]
    return "nvme-auto" if "nvme-auto" in ours else (ours[0] if ours else "")


def conclude(run: Run, points: Sequence[Point], ours: str, token_bytes: int) -> None:
    """Fill in the summary, the published form and the break-even."""
    single = sorted((p for p in points if p.callers == 1), key=lambda p: p.tokens)
    one_k = [p for p in single if p.tokens == 1024]
    run.conclude(
        "ttft_vs_recompute_1k", run.ratio(one_k[0].case, ours, "recompute", TTFT) if one_k else None,
        GOALS["ttft_vs_recompute_1k"],
    )  # fmt: skip
    longest = run.ratio(single[-1].case, ours, "recompute", TTFT) if single else None
    run.conclude("ttft_vs_recompute_longest", longest, GOALS["ttft_vs_recompute_longest"])
    ratios = [r for r in (run.ratio(p.case, ours, "file", TTFT) for p in points) if r is not None]
    run.conclude("ttft_vs_file_max", max(ratios, key=lambda r: r.p50) if ratios else None, GOALS["ttft_vs_file_max"])
    run.extra["published_form"] = published_form(run, points)
    run.extra["break_even"] = break_even(run, points, ours, token_bytes)


def published_form(run: Run, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Per point and arm: TTFT and tokens/s against recompute, and the tokens taken from storage."""
    rows = []
    for point in points:
        base_ms, base_rate = (run.median(point.case, "recompute", m) for m in (TTFT, "tokens_per_s"))
        for arm in dict.fromkeys(s.arm for s in run.samples if s.case == point.case):
            ms, rate = (run.median(point.case, arm, m) for m in (TTFT, "tokens_per_s"))
            if ms is None or rate is None:
                continue
            rows.append(
                {
                    "tokens": point.tokens,
                    "concurrency": point.callers,
                    "arm": arm,
                    "ttft_ms": ms,
                    "ttft_speedup": base_ms / ms if base_ms else None,
                    "tokens_per_s": rate,
                    "throughput_gain": rate / base_rate if base_rate else None,
                    "storage_share": run.median(point.case, arm, "storage_share"),
                }
            )
    return rows


def break_even(run: Run, points: Sequence[Point], ours: str, token_bytes: int) -> list[dict[str, Any]]:
    """The rate below which loading a prefix is slower than computing it, and the rate seen, per point.

    The time for everything but the prefix (scheduling, the last tokens, the first decode step) is in both, so the
    recompute time is an upper bound of what loading may take, and the break-even rate a lower bound.
    """
    rows = []
    for point in points:
        computed, loaded = run.median(point.case, "recompute", TTFT), run.median(point.case, ours, TTFT)
        if computed is None or loaded is None:
            continue
        tokens = point.tokens * point.callers
        rows.append(
            {
                "case": point.case,
                "break_even_tokens_per_s": tokens / computed * 1e3,
                "break_even_gb_s": tokens * token_bytes / computed / 1e6 if token_bytes else None,
                "seen_gb_s": tokens * token_bytes / loaded / 1e6 if token_bytes else None,
                "is_worth_it": loaded < computed,
            }
        )
    return rows


def note_verdicts(run: Run) -> None:
    """One line per point: the break-even and whether storage is worth it here."""
    for row in run.extra["break_even"]:
        rate = (
            f"{row['break_even_gb_s']:.3f} GB/s"
            if row["break_even_gb_s"] is not None
            else f"{row['break_even_tokens_per_s']:.0f} tokens/s"
        )
        seen = f", seen {row['seen_gb_s']:.3f}" if row["seen_gb_s"] is not None else ""
        word = "worth it here" if row["is_worth_it"] else "not worth it here"
        run.notes.append(f"{row['case']}: storage must deliver more than {rate}{seen}: {word}")


def plot(run: Run, points: Sequence[Point]) -> None:
    """TTFT against prefix length, and against the number of callers."""
    single = [p for p in points if p.callers == 1]
    busy_tokens = next((p.tokens for p in points if p.callers > 1), 0)
    busy = [p for p in points if p.tokens == busy_tokens]
    _plot_ttft(run, single, "prefix tokens", {p.case: p.tokens for p in single}, ", one caller")
    _plot_ttft(run, busy, "callers at once", {p.case: p.callers for p in busy}, f", {busy_tokens} tokens each")


def _plot_ttft(run: Run, points: Sequence[Point], label: str, at: Mapping[str, int], what: str) -> None:
    series: dict[str, list[tuple[float, float, float, float]]] = {}
    for point in sorted(points, key=lambda p: at[p.case]):
        for arm in dict.fromkeys(s.arm for s in run.samples if s.case == point.case):
            found = run.spread(point.case, arm, TTFT)
            if found is not None:
                series.setdefault(arm, []).append((float(at[point.case]), found.p50, found.low, found.high))
    if series and len(points) > 1:
        run.plots.append(Plot(f"TTFT after a restart against {label}{what}", label, "ms", series, is_log_x=True))
