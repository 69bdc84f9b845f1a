"""The one harness of all benchmarks: import everything from here.

    from harness import Arm, Measurement, Run, Trial, entry, parser

    def main(argv=None):
        args = parser("What it measures.", rounds=5).parse_args(argv)
        run = Run("bench_x", path=args.path, requested=vars(args), seed=args.seed, is_smoke=args.smoke)
        run.measure("256 KiB read", [Arm("ours", ours, is_required=True), Arm("peer", peer)], rounds=args.rounds)
        run.conclude("ours_vs_peer", run.ratio("256 KiB read", "ours", "peer", "gb_s"), Goal(">=", 1.0, "..."))
        return run.finish(args.json, args.report, args.plots)

    if __name__ == "__main__":
        raise SystemExit(entry(main))

An arm is a function of a Trial that returns a Measurement. It raises WrongBytes or WarmRead to void the whole
run; any other exception is a failed sample, which is kept. Exit codes: 0 measured, 1 void or a required arm
failed, 2 bad input, 3 not cold. Run a script from anywhere: ``python benchmarks/bench_x.py``.
"""

from measure.arms import Arm, Trial, interleave
from measure.coldness import (
    DeviceBytes,
    drop_page_cache,
    files_below,
    require_cold,
    require_cold_files,
    resident_share,
)
from measure.command_line import choices, entry, parser, positive, require_device, writable_directory
from measure.facts import device_line, environment, file_system
from measure.meters import Meter, Progress, process_cpu_s
from measure.plots import Plot
from measure.run import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, EXIT_WARM, Goal, Run
from measure.samples import (
    BadInput,
    Measurement,
    Sample,
    Spread,
    WarmRead,
    WrongBytes,
    paired_ratios,
    spread_of,
    table_rows,
)
from measure.stamps import Arena, page_keys

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_WARM",
    "Arena",
    "Arm",
    "BadInput",
    "DeviceBytes",
    "Goal",
    "Measurement",
    "Meter",
    "Plot",
    "Progress",
    "Run",
    "Sample",
    "Spread",
    "Trial",
    "WarmRead",
    "WrongBytes",
    "choices",
    "device_line",
    "drop_page_cache",
    "entry",
    "environment",
    "file_system",
    "files_below",
    "interleave",
    "page_keys",
    "paired_ratios",
    "parser",
    "positive",
    "process_cpu_s",
    "require_cold",
    "require_cold_files",
    "require_device",
    "resident_share",
    "spread_of",
    "table_rows",
    "writable_directory",
]
