"""How much of a KV transfer from prefill to decode stays visible: whole request, chunk-wise, and by layer groups.

    python benchmarks/bench_pd.py --json pd.json --report pd.html

Two processes, real writes by the driver over loopback. Emulated are: the computing (a wait of --tokens-per-s, the same
for every layer) and the speed of the link (a group counts as arrived no earlier than a first-in first-out link of that
speed would have delivered it). Nothing here says anything about the speed of RDMA.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from harness import Arm, BadInput, Goal, Measurement, Run, Trial, WrongBytes, entry, parser, positive
from pd_bench.prefill import CHUNKS, LAYERS, WHOLE, Job, serve
from pd_bench.shape import KvMemory, ModelShape

from sglang_hicache_ext.config import parse_size
from sglang_hicache_ext.pd.decode import DecodeEndpoint
from sglang_hicache_ext.pd.drivers import make_transport
from sglang_hicache_ext.pd.groups import GroupPlanner
from sglang_hicache_ext.pd.hooks import LoadRequest, LoadState
from sglang_hicache_ext.pd.settings import PdSettings

LENGTHS = (32, 256, 1024, 4096, 8192, 32768)
SLOW_LENGTHS = (1024, 8192)
WARM_UP_BELOW = 4096
SLOW = 0.5
"""The slow link, as a share of what the computing makes per second."""
COLUMNS = ("visible_ms", "last_group_ms", "bound_ms", "ttft_ms", "compute_ms")


def _options(argv: Sequence[str] | None) -> Namespace:
    p = parser((__doc__ or "").split("\n", 1)[0], rounds=3)
    p.add_argument("--transport", default="nixl", choices=["nixl", "mooncake"], help="driver")
    p.add_argument("--ucx", default="TLS=tcp,NET_DEVICES=lo", help="UCX engine configuration of the nixl driver")
    p.add_argument("--group", default="4MiB", help="least bytes of a layer group")
    p.add_argument("--layered-min", default="8MiB", help="chunks of fewer bytes go whole")
    p.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="prompt lengths in tokens")
    p.add_argument(
        "--slow-lengths", default=",".join(map(str, SLOW_LENGTHS)), help="those on the slow link; '' for none"
    )
    p.add_argument("--forward", type=positive, default=8192, help="tokens that one forward computes at most")
    p.add_argument("--tokens-per-s", type=positive, default=3000, help="speed of the emulated computing")
    p.add_argument("--link", default="500MB", help="bytes per second of the emulated link")
    args = p.parse_args(argv)
    if args.smoke:
        args.rounds, args.lengths, args.slow_lengths, args.forward = 1, "32,1024", "1024", 512
    return args


def _lengths(text: str, option: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError as e:
        raise BadInput(f"{option}: {text!r}; write numbers of tokens, 256,8192") from e
    if any(n < 1 or n > 1 << 20 for n in found):
        raise BadInput(f"{option}: {text!r}; write numbers from 1 to 1048576")
    return found


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as f:
        return 1024 * next(int(line.split()[1]) for line in f if line.startswith("MemAvailable:"))


class Pair:
    """The decode side, here, and the prefill process."""

    def __init__(self, args: Namespace, tokens: int) -> None:
        self.shape = ModelShape()
        need = 2 * tokens * self.shape.token_bytes
        free = _available_bytes()
        if need > free:
            raise BadInput(f"--lengths: {tokens} tokens need {need >> 20} MiB on both sides, {free >> 20} MiB are free")
        self.settings = PdSettings(
            args.transport, parse_size(args.group, "--group"), parse_size(args.layered_min, "--layered-min"),
            deadline_s=120.0, ucx=args.ucx if args.transport == "nixl" else "",
        )  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, self.shape, tokens, self.settings), daemon=True)
        self._process.start()
        there.close()
        self.memory = KvMemory(self.shape, tokens)
        self.end = DecodeEndpoint(self.memory.geometry(), make_transport(self.settings), self.settings)
        self.planner = GroupPlanner(self.memory.geometry(), self.settings)
        self.peer = self.end.connect(str(self._hear(60)), 30.0)
        self._rooms = itertools.count(1)

    def _hear(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError("the prefill process does not answer")
        return self._pipe.recv()

    def transfer(self, job: Job) -> tuple[dict[str, Any], float]:
        """Run a job; its times on the prefill side and when everything had landed here."""
        pages = np.random.default_rng(job.seed + 1).permutation(self.memory.slots)[
            : -(-job.tokens // self.shape.page_tokens)
        ]
        self.memory.pages[:, :, pages] = -1
        load = self.end.start_load_kv(LoadRequest(self.peer, job.room, pages, 120.0, {"aux": np.array([0])}))
        self._pipe.send(job)
        load.wait_for_layer_load(self.shape.layers, 120.0)
        landed = time.monotonic()
        times = self._hear(130)
        status = load.status()
        if "error" in times or status.state is not LoadState.COMPLETE:
            load.release()
            raise RuntimeError(times.get("error") or f"{status.state}: {status.reason}; prefill: {times}")
        wrong = self.memory.wrong_pages(load.publish(), job.room)
        if wrong:
            raise WrongBytes(f"{wrong} pieces of pages")
        return times, landed

    def last_group_bytes(self, job: Job) -> int:
        """Bytes that cannot be sent before the last layer of the last forward is computed."""
        pages = -(-job.tokens // self.shape.page_tokens)
        step = job.forward_tokens // self.shape.page_tokens
        last = {WHOLE: pages, CHUNKS: (pages - 1) % step + 1, LAYERS: (pages - 1) % step + 1}[job.way]
        group = self.planner.plan(last, layered=job.way == LAYERS)[-1]
        return last * (group.stop - group.start) * 2 * self.shape.half_page_bytes

    def arm(self, way: str, tokens: int, args: Namespace, bytes_per_s: float) -> Arm:
        def run(trial: Trial) -> Measurement:
            job = Job(next(self._rooms), tokens, way, args.forward, args.tokens_per_s, bytes_per_s, trial.seed)
            times, landed = self.transfer(job)
            ttft_s, compute_s = landed - times["begun"], times["compute_s"]
            last_s = self.last_group_bytes(job) / bytes_per_s
            whole_s = tokens * self.shape.token_bytes / bytes_per_s
            values = {
                "ttft_ms": 1e3 * ttft_s, "compute_ms": 1e3 * compute_s, "visible_ms": 1e3 * (ttft_s - compute_s),
                "last_group_ms": 1e3 * last_s, "bound_ms": 1e3 * max(last_s, whole_s - compute_s + last_s),
            }  # fmt: skip
            values["visible_vs_last_group"] = values["visible_ms"] / values["last_group_ms"]
            values["visible_vs_bound"] = values["visible_ms"] / values["bound_ms"]
            return Measurement(values)

        return Arm(way, run, {"tokens": tokens, "link_bytes_per_s": bytes_per_s}, is_required=True)

    def close(self) -> dict[str, Any]:
        self._pipe.send(None)
        told = self._hear(20)
        here = self.end.describe()
        self.end.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
        return {"prefill": told, "decode": here}


def _measure(run: Run, pair: Pair, args: Namespace, lengths: Sequence[int], link: float, name: str) -> bool:
    for tokens in lengths:
        arms = [pair.arm(way, tokens, args, link) for way in (WHOLE, CHUNKS, LAYERS)]
        warm_up = int(
            tokens < WARM_UP_BELOW
        )  # longer ones need none: the path is warm, and a round takes half a minute
        if not run.measure(f"{tokens} tokens, {name} link", arms, args.rounds, warm_up):
            return False
    return True


def _conclude(run: Run, pair: Pair, lengths: Sequence[int], slow_lengths: Sequence[int]) -> None:
    def case(tokens: int, name: str) -> str:
        return f"{tokens} tokens, {name} link"

    for tokens in lengths:
        figure = run.spread(case(tokens, "fast"), LAYERS, "visible_vs_last_group")
        goal = Goal("<=", 1.3, "visible time against the last group's transfer") if tokens >= 8192 else None
        run.conclude(f"visible_vs_last_group_{_short(tokens)}", figure, goal)
        run.conclude(
            f"layers_vs_whole_request_{_short(tokens)}", run.ratio(case(tokens, "fast"), LAYERS, WHOLE, "visible_ms")
        )
    for tokens in slow_lengths:
        figure = run.spread(case(tokens, "slow"), LAYERS, "visible_vs_bound")
        is_named = tokens == max(slow_lengths)
        goal = Goal("<=", 1.1, "visible time against transfer - compute + one group") if is_named else None
        run.conclude("visible_vs_bound_slow_link" + ("" if is_named else f"_{_short(tokens)}"), figure, goal)
    below = [n for n in lengths if n * pair.shape.token_bytes < pair.settings.layered_min]
    if below:
        ratio = run.ratio(case(max(below), "fast"), LAYERS, WHOLE, "visible_ms")
        run.conclude("short_vs_whole_request", ratio, Goal("<=", 1.05, "a prompt below the threshold"))


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def main(argv: Sequence[str] | None = None) -> int:
    args = _options(argv)
    lengths, slow_lengths = _lengths(args.lengths, "--lengths"), _lengths(args.slow_lengths, "--slow-lengths")
    if not lengths or args.forward % ModelShape().page_tokens:
        raise BadInput(f"--lengths {args.lengths!r}, --forward {args.forward}; give lengths, and whole pages of 32")
    link = float(parse_size(args.link, "--link"))
    made = args.tokens_per_s * ModelShape().token_bytes
    if link < made:
        raise BadInput(f"--link {args.link} is slower than the computing, which makes {made / 1e6:.0f} MB/s")
    run = Run("bench_pd", None, vars(args), args.seed, args.smoke, COLUMNS)
    pair = Pair(args, max([*lengths, *slow_lengths]))
    run.notes.append(
        f"emulated: computing {args.tokens_per_s} tokens/s ({made / 1e6:.0f} MB/s of KV); links {link / 1e6:.0f} MB/s and "
        f"{SLOW * made / 1e6:.0f} MB/s, first in, first out. Real: {pair.end.describe()['transport']} writes between two "
        "processes, every byte checked afterwards."
    )
    try:
        if _measure(run, pair, args, lengths, link, "fast"):
            _measure(run, pair, args, slow_lengths, SLOW * made, "slow")
        _conclude(run, pair, lengths, slow_lengths)
    finally:
        run.extra["endpoints"] = pair.close()
    return run.finish(args.json, args.report, args.plots)


if __name__ == "__main__":
    raise SystemExit(entry(main))
