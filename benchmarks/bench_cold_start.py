"""Is L3 worth it? Time to first token after a restart, against the prefix length, the callers at once, and the store.

    python benchmarks/bench_cold_start.py --path /mnt/nvme0/bench --json cold.json --report cold.html
    python benchmarks/bench_cold_start.py --url http://localhost:30000 --json cold.json

Without --url it starts a real SGLang server for every arm and every round, on the CPU with a random model, or with
--device cuda and --model on a GPU. README.md beside this file explains every column.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cold_start_bench.local import LocalExperiment
from cold_start_bench.points import Point, make_points
from cold_start_bench.remote import connect, measure_server
from cold_start_bench.servers import ARMS, POOLED, ServerArm, engine_dtype, kv_token_bytes, random_model
from cold_start_bench.verdict import conclude, note_verdicts, our_arm, plot
from harness import BadInput, Run, choices, entry, parser, positive, require_device, writable_directory

COLUMNS = ("ttft_ms", "request_ttft_ms", "tokens_per_s", "storage_share", "failed_requests")
DEFAULT_ARMS = "recompute,file,nixl,nvme-auto,nvme-posix,tiered,tiered-fresh,linker"
POOL_LEAST, POOL_SPARE, POOL_LEASE_MS = 256 << 20, 1.5, 600_000


def _options(argv: Sequence[str] | None) -> Namespace:
    p = parser(__doc__.split("\n", 1)[0], rounds=2)
    p.add_argument("--path", default=".build/bench-cold-start", help="directory on the drive to measure; scratch space")
    p.add_argument("--arms", default=DEFAULT_ARMS, help=f"out of {', '.join(ARMS)}")
    p.add_argument("--lengths", default="1024,2048,4096,8128", help="prefix lengths in tokens, multiples of 64")
    p.add_argument("--callers", default="1,4,8,16", help="callers at once, each with its own prompt")
    p.add_argument(
        "--busy-tokens",
        type=positive,
        default=SUPPRESS,
        help="prefix length with several callers (default: 1024; *512)",
    )
    p.add_argument(
        "--repeats", type=positive, default=SUPPRESS, help="prompts per length, one caller and round (default: 2; *1)"
    )
    p.add_argument("--new-tokens", type=positive, default=4, help="tokens generated; their identity is checked")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where SGLang runs")
    p.add_argument("--model", default="", help="model directory; a random 12-layer model when empty")
    p.add_argument("--url", default="", help="a running SGLang server with a storage backend, instead of our own")
    p.add_argument("--key", default="", help="API or admin key of that server")
    p.add_argument("--settle-s", type=float, default=3.0, help="with --url: seconds for the write-behind to finish")
    p.add_argument("--kv-bytes", type=int, default=0, help="KV bytes per token; 0 takes it from the model's config")
    p.epilog = "* On a CPU without bfloat16 instructions, which computes prompts too slowly for more in half an hour."
    args = p.parse_args(argv)
    is_slow = not args.url and engine_dtype(args.device) == "float32"
    usual = {"busy_tokens": 512, "repeats": 1} if is_slow else {"busy_tokens": 1024, "repeats": 2}
    args = Namespace(**(usual | vars(args)))
    if args.smoke:
        args.rounds, args.repeats, args.lengths, args.callers, args.busy_tokens = 1, 1, "512,1024", "1,2", 512
        args.arms = "recompute,nvme-auto" if args.arms == DEFAULT_ARMS else args.arms
    return args


def _numbers(text: str, option: str, step: int = 1) -> list[int]:
    try:
        values = [int(t) for t in text.split(",")]
    except ValueError:
        values = [0]
    if any(v < 1 or v % step for v in values):
        raise BadInput(f"{option} {text!r}: write whole numbers, multiples of {step}, such as 1024,2048")
    return values


def _points(args: Namespace) -> list[Point]:
    lengths = _numbers(args.lengths, "--lengths", 64)
    return make_points(lengths, _numbers(args.callers, "--callers"), args.busy_tokens // 64 * 64 or 64, args.repeats)


def _model(args: Namespace, path: str) -> tuple[str, str]:
    """(directory, kind): the one given, or a random one of the CPU kit."""
    if args.device == "cuda" and not args.model:
        raise BadInput("--device cuda needs --model: the random model is for the CPU")
    if args.model:
        if not (Path(args.model) / "config.json").is_file():
            raise BadInput(f"--model {args.model} has no config.json; name a model directory")
        return args.model, "big"
    kind = "tiny" if args.smoke else "big"
    return random_model(kind, os.path.join(path, "model")), kind


def _local(args: Namespace, run: Run, points: Sequence[Point], path: str) -> None:
    names = choices(args.arms, ARMS, "--arms")
    model, kind = _model(args, path)
    dtype = engine_dtype(args.device)
    token_bytes = args.kv_bytes or kv_token_bytes(model, dtype)
    longest = max(p.tokens for p in points) + 256
    most = max(max(p.tokens * p.callers for p in points) + 2048, 2 * longest)
    names = [n for n in names if _can_run(n, run)]
    stored = token_bytes * sum(p.tokens * p.callers * p.repeats for p in points)
    with _pool(names, Path(path) / "pool", stored) as master:
        arms = [
            ServerArm(n, model, kind, Path(path) / n, args.device, most // 64 * 64, longest, master=master)
            for n in names
        ]
        experiment = LocalExperiment(run, arms, points, args.rounds, args.new_tokens, token_bytes, args.seed)
        run.extra |= {"kv_bytes_per_token": token_bytes, "dtype": dtype}
        experiment.execute()
    conclude(run, points, our_arm(run), token_bytes)


@contextmanager
def _pool(names: Sequence[str], folder: Path, stored: int) -> Iterator[str]:
    """A Mooncake master and a store node on loopback that outlive every server; their address, "" when no arm needs them.

    Args:
        stored: bytes of all prompts.
    """
    if not set(names) & set(POOLED):
        yield ""
        return
    from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster

    room = POOL_LEAST + round(POOL_SPARE * stored)
    with LocalCluster(folder, node_bytes=room, lease_ms=POOL_LEASE_MS) as cluster:
        yield cluster.master_address


PACKAGES = {"nixl": "nixl nixl-cu12", **dict.fromkeys(POOLED, "mooncake-transfer-engine-non-cuda")}


def _can_run(name: str, run: Run) -> bool:
    """Whether what the arm needs is installed; a note when it is not."""
    module = {"nixl": "nixl", **dict.fromkeys(POOLED, "mooncake")}.get(name)
    if module is None or importlib.util.find_spec(module) is not None:
        return True
    run.notes.append(f"{name} is not measured: {module} is not installed (pip install --no-deps {PACKAGES[name]})")
    return False


def _remote(args: Namespace, run: Run, points: Sequence[Point]) -> None:
    client, name, info = connect(args.url, args.key)
    token_bytes = args.kv_bytes or kv_token_bytes(str(info["model_path"]))
    run.effective[name] = {k: info.get(k) for k in ("model_path", "device", "page_size", "hicache_storage_backend")}
    run.notes.append(
        "Cold here means: not on the GPU and not in host memory. The server's page cache is not controlled."
    )
    measure_server(run, client, name, points, args.rounds, args.new_tokens, args.settle_s)
    conclude(run, points, name, token_bytes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    args = _options(argv)
    points = _points(args)
    require_device(args.device)
    if args.url:
        connect(args.url, args.key)
    base = writable_directory(args.path, "--path")
    path = tempfile.mkdtemp(prefix="run-", dir=base)
    run = Run("bench_cold_start", path, vars(args), args.seed, args.smoke, COLUMNS, sys.stdout)
    try:
        if args.url:
            _remote(args, run, points)
        else:
            _local(args, run, points, path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    note_verdicts(run)
    plot(run, points)
    return run.finish(args.json, args.report, args.plots)


if __name__ == "__main__":
    raise SystemExit(entry(main))
