"""What the tools cost the servers: two server processes read and write one directory, with and without verify, gc and
inspect going through it all the time. Every byte the servers read is checked.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Arm, Goal, Measurement, Run, WrongBytes, entry, parser, writable_directory

from sglang_hicache_ext.testing.load import Load

CASE, SERVERS, PAGE_BYTES = "two servers", 2, 256 << 10
TOOLS = (("inspect",), ("gc", "--older-than", "1h", "--apply"), ("verify", "--rate", "{rate}"))


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__ or "", rounds=6)
    made.add_argument("--path", default="", help="directory on the drive to measure; a temporary one when empty")
    made.add_argument("--seconds", type=float, default=8.0, help="length of one trial")
    made.add_argument("--engine", default="auto", help="I/O engine of the servers")
    made.add_argument("--rate", default="128MiB", help="bytes a second verify may read; 0 for no limit")
    args = made.parse_args(argv)
    base = writable_directory(args.path, "--path") if args.path else tempfile.gettempdir()
    scratch = tempfile.mkdtemp(prefix="bench_tools_", dir=base)
    try:
        return measure(args, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def measure(args: Any, scratch: str) -> int:
    run = Run("bench_tools", path=scratch, requested=vars(args), seed=args.seed, is_smoke=args.smoke)
    seconds = 2.0 if args.smoke else args.seconds
    most_pages = 512 if args.smoke else 8192
    config = {"path": f"{scratch}/store", "capacity": "8GiB", "engine": args.engine}
    servers = [Load(config, f"server-{i}", PAGE_BYTES, most_pages) for i in range(SERVERS)]
    try:
        fill(servers, most_pages)
        arms = [
            Arm("alone", lambda _: trial(servers, seconds, None), is_required=True),
            Arm("with tools", lambda _: trial(servers, seconds, config["path"], args.rate), is_required=True),
        ]
        run.measure(CASE, arms, rounds=args.rounds)
    finally:
        for server in servers:
            server.close()
    run.notes.append(f"{SERVERS} servers, {most_pages} pages of {PAGE_BYTES >> 10} KiB each, read in batches of 32")
    share = run.ratio(CASE, "with tools", "alone", "pages_s")
    run.conclude("tools_under_load_share", share, Goal(">=", 0.8, "pages a second of the servers, with tools / alone"))
    return run.finish(args.json, args.report, args.plots)


def fill(servers: Sequence[Load], most_pages: int) -> None:
    """Let the servers write until they hold all of their pages, so that both arms do the same work."""
    counts = [{"written": 0} for _ in servers]
    while any(c["written"] < most_pages for c in counts):
        for server in servers:
            server.ask("run 1")
        counts = [server.answer() for server in servers]


def trial(servers: Sequence[Load], seconds: float, path: str | None, rate: str = "0") -> Measurement:
    """One run of both servers; with ``path`` the tools run in turns until it ends."""
    stop, done = threading.Event(), [0]
    tools = threading.Thread(target=_tools, args=(path, rate, stop, done)) if path else None
    before = _ask(servers, "run 0")
    started = time.monotonic()
    if tools is not None:
        tools.start()
    after = _ask(servers, f"run {seconds}")
    elapsed = time.monotonic() - started
    stop.set()
    if tools is not None:
        tools.join()
    bad = {name: sum(c[name] for c in after) for name in ("wrong", "lost", "refused")}
    if any(bad.values()):
        raise WrongBytes(f"servers counted {bad}")
    pages = sum(a["queried"] - b["queried"] for a, b in zip(after, before, strict=True))
    return Measurement({"pages_s": pages / elapsed, "tool_runs": done[0]}, {}, {"pages": pages})


def _ask(servers: Sequence[Load], line: str) -> list[dict[str, Any]]:
    for server in servers:
        server.ask(line)
    return [server.answer() for server in servers]


def _tools(path: str, rate: str, stop: threading.Event, done: list[int]) -> None:
    while not stop.is_set():
        verb, *options = TOOLS[done[0] % len(TOOLS)]
        command = [sys.executable, "-m", "sglang_hicache_ext.cli.main", verb, path, *options, "--json"]
        command = [word.format(rate=rate) for word in command]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while child.poll() is None and not stop.wait(0.05):
            pass
        if child.poll() is None:
            child.terminate()
            child.wait(30)
            return
        if child.returncode != 0:
            raise RuntimeError(f"{verb} ended with {child.returncode}")
        done[0] += 1


if __name__ == "__main__":
    raise SystemExit(entry(main))
