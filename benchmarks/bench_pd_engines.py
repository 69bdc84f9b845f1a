"""A real prefill/decode pair with our transfer backend against the same pair with SGLang's nixl backend.

    python benchmarks/bench_pd_engines.py --rounds 5 --json pd_engines.json

Both pairs are up for the whole run and take turns; the one that is not measured is stopped (SIGSTOP), since an idle PD
server uses a whole core. The model has the KV bytes of an 8 B model and next to no arithmetic. Prompts are new in
every round and the same for both arms; the tokens of both must be equal. Bytes go over TCP on loopback in both.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Arm, Goal, Measurement, Run, Trial, WrongBytes, entry, parser, positive

KIT = Path(__file__).resolve().parents[1] / "tests" / "sglang_cpu"
BACKENDS = {"ours": "hicache_ext", "nixl": "nixl"}
CASE = "prefill/decode pair"
NEW_TOKENS = 4
OVERLAPPING = 4
LONG_LIMIT = 1024


class Contest:
    """Two pairs and what they answered."""

    def __init__(self, args: Any, folder: Path) -> None:
        import models
        import pd_kit

        self._args = args
        model = models.write_model(args.model, str(folder / "model"))
        size = {"max_total_tokens": 8192, "context_length": 4096, "chunked_prefill_size": args.chunk}
        self.pairs = {}
        for name, backend in BACKENDS.items():
            (folder / name).mkdir()
            self.pairs[name] = pd_kit.Pair(model, args.model, folder / name, backend, **size)
        self._answers: dict[tuple[int, int], list[int]] = {}

    def start(self) -> None:
        for pair in self.pairs.values():
            pair.start("prefill", "decode")
            pair.freeze()

    def stop(self) -> None:
        for pair in self.pairs.values():
            pair.stop("prefill", "decode")

    def run(self, name: str, trial: Trial) -> Measurement:
        pair = self.pairs[name]
        pair.thaw()
        try:
            pair.generate(self._prompt(trial.seed, 10_000, 32), NEW_TOKENS)  # wakes both
            short = [self._ttft(pair, trial.seed, i, self._args.short) for i in range(self._args.count)]
            long = [self._ttft(pair, trial.seed, 100 + i, self._args.long) for i in range(self._args.count)]
            rate = self._rate(pair, trial.seed)
        finally:
            pair.freeze()
        values = {
            "ttft_short_ms": statistics.median(short),
            "ttft_long_ms": statistics.median(long),
            "requests_per_s": rate,
        }
        return Measurement(values, {"ttft_short_ms": short, "ttft_long_ms": long})

    def _prompt(self, seed: int, index: int, tokens: int) -> list[int]:
        import random

        numbers = random.Random(seed * 100_003 + index)
        return [numbers.randrange(3, 259) for _ in range(tokens)]

    def _ttft(self, pair: Any, seed: int, index: int, tokens: int) -> float:
        answer = pair.generate(self._prompt(seed, index, tokens), NEW_TOKENS, stream=True)
        self._check(seed, index, answer)
        return float(answer["ttft_s"]) * 1e3

    def _rate(self, pair: Any, seed: int) -> float:
        """Requests per second, OVERLAPPING at a time, every other one long."""
        count = 2 * self._args.count
        lengths = [self._args.long if i % 2 else self._args.short for i in range(count)]
        started = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(OVERLAPPING) as pool:
            asked = [
                pool.submit(pair.generate, self._prompt(seed, 200 + i, n), NEW_TOKENS) for i, n in enumerate(lengths)
            ]
            answers = [a.result() for a in asked]
        elapsed = time.perf_counter() - started
        for i, answer in enumerate(answers):
            self._check(seed, 200 + i, answer)
        return count / elapsed

    def _check(self, seed: int, index: int, answer: Any) -> None:
        if "error" in answer:
            raise RuntimeError(f"request failed: {answer['message'][:300]}")
        if self._answers.setdefault((seed, index), answer["out"]) != answer["out"]:
            raise WrongBytes(
                f"prompt {index} of seed {seed}: {answer['out']}, the other backend {self._answers[seed, index]}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("PD transfer: our backend against SGLang's nixl backend, real servers.", rounds=5)
    made.add_argument(
        "--model", choices=("wide", "tiny", "big"), default="wide", help="random model, see tests/sglang_cpu"
    )
    made.add_argument("--short", type=positive, default=64, help="tokens of a short prompt")
    made.add_argument("--long", type=positive, default=LONG_LIMIT, help="tokens of a long prompt")
    made.add_argument("--chunk", type=positive, default=4096, help="--chunked-prefill-size of both prefill servers")
    made.add_argument("--count", type=positive, default=4, help="prompts of each kind in a round")
    args = made.parse_args(argv)
    if args.smoke:
        args.model, args.rounds, args.count, args.long = "tiny", 1, 1, 512
    sys.path.append(str(KIT))
    run = Run("bench_pd_engines", path=None, requested=vars(args), seed=args.seed, is_smoke=args.smoke)
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(args, Path(folder))
        try:
            contest.start()
            arms = [
                Arm(name, lambda trial, name=name: contest.run(name, trial), is_required=name == "ours")
                for name in BACKENDS
            ]
            run.measure(CASE, arms, rounds=args.rounds)
        finally:
            contest.stop()
    conclude(run)
    return run.finish(args.json, args.report, args.plots)


def conclude(run: Run) -> None:
    lower, higher = (
        Goal("<=", 1.0, "no later than SGLang's nixl backend"),
        Goal(">=", 1.0, "no fewer requests a second"),
    )
    run.conclude("ttft_vs_nixl_short", run.ratio(CASE, "ours", "nixl", "ttft_short_ms"), lower)
    run.conclude("ttft_vs_nixl_long", run.ratio(CASE, "ours", "nixl", "ttft_long_ms"), lower)
    run.conclude("throughput_vs_nixl", run.ratio(CASE, "ours", "nixl", "requests_per_s"), higher)


if __name__ == "__main__":
    raise SystemExit(entry(main))
