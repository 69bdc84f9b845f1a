"""The figures of ``summary``, what they have to reach, and the plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness import Goal, Plot, Run, Spread

from storage_bench.bandwidth import CEILINGS, OURS
from storage_bench.shape import KIB, MIB

GOALS = {
    "read_share_256k": Goal(
        ">=", 0.95, "cold read of 256 KiB pages, share of the device ceiling, worse of both orders"
    ),
    "read_share_2m": Goal(">=", 0.95, "cold read of 2 MiB pages, share of the device ceiling, worse of both orders"),
    "read_vs_file_256k": Goal(
        ">=", 3.0, "cold read of 256 KiB pages against SGLang's file backend, worse of both orders"
    ),
    "read_share_32k": Goal(">=", 0.85, "cold random read of 32 KiB pages, share of the device ceiling"),
    "write_share_256k": Goal(">=", 0.9, "write of 256 KiB pages, share of the device ceiling"),
    "write_vs_nixl_256k": Goal(">=", 1.8, "write of 256 KiB pages against NIXL with io_uring"),
    "write_vs_file_256k": Goal(">=", 1.8, "write of 256 KiB pages against SGLang's file backend"),
    "read_cpu_vs_nixl_256k": Goal("<=", 0.6, "CPU per GB of a 256 KiB read against NIXL, our checksum included"),
    "read_cpu_vs_nixl_256k_nosum": Goal("<=", 0.25, "the same with our hashing taken out by the benchmark"),
    "exists128_us": Goal("<=", 200.0, "existence of 128 keys, p50, in microseconds"),
    "open_clean_s": Goal("<=", 2.0, "open after a clean close or kill -9, the slower of both, in seconds"),
    "open_rebuild_s": Goal("<=", 15.0, "open after losing the index, in seconds"),
    "stripe4_vs_1": Goal(">=", 3.6, "four directories of fixed bandwidth against one"),
    "index_bytes_per_page": Goal("<=", 200.0, "mapped bytes of the index per page"),
}


def headline_arm(run: Run) -> str:
    """The arm that the summary speaks of: the best engine that ran here, in the order ``auto`` prefers."""
    ran = {s.arm for s in run.samples}
    return next((name for name in OURS if name in ran), "")


def ceiling_arm(run: Run, case: str) -> str:
    """The better of the two ceilings in this case."""
    medians = {name: run.median(case, name, "gb_s") for name in CEILINGS}
    known = {name: value for name, value in medians.items() if value is not None}
    return max(known, key=lambda name: known[name]) if known else ""


def conclude_bandwidth(run: Run) -> None:
    """Fill in every figure of the bandwidth part; None where its case or arm was not run."""
    ours = headline_arm(run)
    run.extra["headline_arm"] = ours
    both = ("sequential", "shuffled")
    share: Callable[[str], Spread | None] = lambda case: run.ratio(case, ours, ceiling_arm(run, case), "gb_s")  # noqa: E731

    def against(arm: str, metric: str, mine: str = ours) -> Callable[[str], Spread | None]:
        return lambda case: run.ratio(case, mine, arm, metric)

    def put(
        name: str, pick: Callable[..., Spread], figure: Callable[[str], Spread | None], cases: Sequence[str]
    ) -> None:
        found = [f for f in map(figure, cases) if f is not None]
        run.conclude(name, pick(found, key=lambda f: f.p50) if found else None, GOALS[name])

    def reads(size: str, orders: Sequence[str] = both) -> list[str]:
        return [f"read {size} {order} 1t" for order in orders]

    write = ["write 256k sequential 1t"]
    put("read_share_256k", min, share, reads("256k"))
    put("read_share_2m", min, share, reads("2m"))
    put("read_vs_file_256k", min, against("sglang-file", "gb_s"), reads("256k"))
    put("read_share_32k", min, share, reads("32k", ("shuffled",)))
    put("write_share_256k", min, share, write)
    put("write_vs_nixl_256k", min, against("nixl-uring", "gb_s"), write)
    put("write_vs_file_256k", min, against("sglang-file", "gb_s"), write)
    put("read_cpu_vs_nixl_256k", max, against("nixl-uring", "cpu_s_per_gb"), reads("256k"))
    nosum = against("nixl-uring", "cpu_s_per_gb", "ours-io_uring-nosum")
    put("read_cpu_vs_nixl_256k_nosum", max, nosum, reads("256k"))
    run.extra["ceiling_arms"] = {case: ceiling_arm(run, case) for case in dict.fromkeys(s.case for s in run.samples)}


def plot_bandwidth(run: Run) -> None:
    """GB/s and CPU per GB against the page size, one plot per direction and order."""
    cases = list(dict.fromkeys(s.case for s in run.samples))
    for kind in ("read sequential", "read shuffled", "write sequential"):
        direction, order = kind.split()
        own = [c for c in cases if c.startswith(f"{direction} ") and c.endswith(f" {order} 1t")]
        cold = "Cold read" if direction == "read" else "Write"
        for metric, label in (("gb_s", "GB/s"), ("cpu_s_per_gb", "CPU s per GB")):
            series = _series(run, own, metric)
            if series:
                names = {float(_bytes(c)): c.split()[1] for c in own}
                title = f"{cold}, {order} order: {label} against page size"
                run.plots.append(Plot(title, "page size", label, series, is_log_x=True, names=names))


def _series(run: Run, cases: Sequence[str], metric: str) -> dict[str, list[tuple[float, float, float, float]]]:
    series: dict[str, list[tuple[float, float, float, float]]] = {}
    for case in cases:
        for arm in dict.fromkeys(s.arm for s in run.samples if s.case == case):
            found = run.spread(case, arm, metric)
            if found is not None:
                series.setdefault(arm, []).append((float(_bytes(case)), found.p50, found.low, found.high))
    return series


def _bytes(case: str) -> int:
    text = case.split()[1]
    return int(text[:-1]) * (MIB if text.endswith("m") else KIB)
