"""Cold start, shown: a real SGLang engine on one storage directory, started afresh for every run.

    write       our store, empty: every prompt is computed, and written behind
    read        a new process, GPU and host caches empty: every prefix comes from storage
    recompute   no storage: every prompt is computed
    corrupt     bytes flipped on disk before the start: every hit turns into a counted miss

It fails unless the tokens of all runs are identical, every prefix of `read` came from storage and every page that
`corrupt` touched was counted as corrupt. The model is random and runs on the CPU: the times show that the effect is
there, not how large it is on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parent.parent / "tests" / "sglang_cpu"
sys.path.append(str(KIT))

import engine_kit  # noqa: E402
import models  # noqa: E402

PAGE_TOKENS = engine_kit.PAGE_TOKENS
RUNS = ("write", "read", "recompute", "corrupt")


class ColdStartError(Exception):
    """Something that must hold does not."""


def job_of(options: argparse.Namespace, work: Path, run: str) -> dict[str, Any]:
    arguments = engine_kit.engine_arguments(str(work / "model"))
    if run != "recompute":
        extra = {"path": str(work / "store"), "capacity": options.capacity, "engine": options.engine}
        arguments |= engine_kit.storage_arguments("nvme", options.layout, {**extra, "prefetch_threshold": 256})
    return {
        "engine": arguments,
        "prompts": options.prompts,
        "tokens": options.tokens,
        "new_tokens": options.new_tokens,
        "expect_written_pages": (options.tokens // PAGE_TOKENS) * options.prompts if run == "write" else 0,
    }


def run_engine(options: argparse.Namespace, work: Path, run: str) -> dict[str, Any]:
    """Start one engine, show its progress, return what it said."""
    answers = 0

    def show(line: dict[str, Any]) -> None:
        nonlocal answers
        if "answer" in line:
            answers += 1
            print(f"  {run}: prompt {answers}/{options.prompts}, TTFT {line['answer']['ttft_s']:.2f} s", flush=True)
        elif "up" in line:
            print(f"  {run}: engine up after {line['up']} s", flush=True)

    kind = "tiny" if options.smoke else "big"
    return engine_kit.run_engine(job_of(options, work, run), kind, work / f"{run}.log", options.limit_s, show)


def flip_bytes(store: Path) -> int:
    """Flip one byte in every 64 KiB of every segment; returns how many."""
    flipped = 0
    for segment in sorted(store.rglob("*.seg")):
        with open(segment, "r+b") as f:
            for offset in range(32 << 10, segment.stat().st_size, 64 << 10):
                f.seek(offset)
                byte = f.read(1)
                f.seek(offset)
                f.write(bytes([byte[0] ^ 0xFF]))
                flipped += 1
            os.fsync(f.fileno())
    return flipped


def check(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Everything that must hold. Raises ColdStartError with the first that does not."""
    reference = [a["out"] for a in results["recompute"]["answers"]]
    for run in RUNS:
        if [a["out"] for a in results[run]["answers"]] != reference:
            raise ColdStartError(f"tokens of run {run!r} differ from recompute")
    whole = ((options.tokens - 1) // PAGE_TOKENS) * PAGE_TOKENS
    for run, expected in (("write", 0), ("read", whole), ("corrupt", 0)):
        got = [a["from"].get("storage", 0) for a in results[run]["answers"]]
        if got != [expected] * options.prompts:
            raise ColdStartError(f"run {run!r} took {got} tokens a prompt from storage, expected {expected}")
    corrupt = results["corrupt"]["state"]["read_outcomes"].get("corrupt", 0)
    if corrupt < options.prompts:
        raise ColdStartError(f"only {corrupt} pages counted as corrupt")


def table(results: dict[str, dict[str, Any]]) -> str:
    head = f"{'run':<10} {'TTFT s':>8} {'L3 hit':>6} {'pages written':>14} {'pages read':>11} {'MB written':>11} {'MB read':>8} {'GB/s':>6} {'corrupt':>8}"
    rows = [head, "-" * len(head)]
    for run in RUNS:
        state = results[run].get("state") or {}
        moved = state.get("moved", {})
        ttft = [a["ttft_s"] for a in results[run]["answers"]]
        share = sum(a["from"].get("storage", 0) for a in results[run]["answers"]) / sum(
            a["prompt_tokens"] for a in results[run]["answers"]
        )
        seconds = moved.get("read_seconds", 0.0)
        rate = f"{moved['read_bytes'] / seconds / 1e9:.2f}" if seconds else "-"
        rows.append(
            f"{run:<10} {sum(ttft) / len(ttft):>8.2f} {share:>6.0%} {int(moved.get('write_pages', 0)):>14} "
            f"{int(moved.get('read_pages', 0)):>11} {moved.get('write_bytes', 0) / 1e6:>11.1f} {moved.get('read_bytes', 0) / 1e6:>8.1f} "
            f"{rate:>6} {state.get('read_outcomes', {}).get('corrupt', 0):>8}"
        )
    return "\n".join(rows)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="work directory; a temporary one, removed afterwards, by default")
    parser.add_argument(
        "--layout", default="page_first_direct", choices=("layer_first", "page_first", "page_first_direct")
    )
    parser.add_argument("--engine", default="auto", help="I/O engine of the store")
    parser.add_argument("--capacity", default="2GiB", help="capacity of the store")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1600, help="tokens a prompt")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=900, help="longest time one engine may take")
    parser.add_argument("--smoke", action="store_true", help="a small model and short prompts, for CI")
    parser.add_argument("--json", help="write all results to this file")
    options = parser.parse_args()
    if options.smoke:
        options.prompts, options.tokens = min(options.prompts, 2), min(options.tokens, 520)
    return options


def demonstrate(options: argparse.Namespace, work: Path) -> dict[str, dict[str, Any]]:
    kind = "tiny" if options.smoke else "big"
    print(f"writing a random {'4-layer' if options.smoke else '12-layer, hidden 1024'} model", flush=True)
    models.write_model(kind, str(work / "model"))
    results: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(RUNS, 1):
        if run == "corrupt":
            print(f"  flipped {flip_bytes(work / 'store')} bytes on disk", flush=True)
        print(f"run {number}/{len(RUNS)}: {run}", flush=True)
        results[run] = run_engine(options, work, run)
    return results


def main() -> int:
    options = parse_options()
    work = Path(options.dir or tempfile.mkdtemp(prefix="hicache-cold-start-"))
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        results = demonstrate(options, work)
        check(results, options)
    except (ColdStartError, engine_kit.EngineError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    finally:
        if not options.dir:
            shutil.rmtree(work, ignore_errors=True)
    store = results["read"]["state"]["store"]
    print(f"\n{table(results)}\n")
    print(
        f"{options.prompts} prompts of {options.tokens} tokens, pages of {PAGE_TOKENS} tokens, layout {options.layout}, {platform.machine()} CPU"
    )
    print(
        f"engine asked for: {store['engine_requested']}; in use: {store['engine']} ({json.dumps(store['engines'][0])})"
    )
    print(
        f"PASS: same tokens in all runs, every prefix of 'read' from storage, corruption counted ({time.monotonic() - started:.0f} s)"
    )
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "runs": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
