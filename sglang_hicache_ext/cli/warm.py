"""`hicache-ext warm`: publish what a warm node holds, or fill a fresh node's NVMe from the remote tier.

    python -m sglang_hicache_ext.cli.warm publish --config CONFIG.json
    python -m sglang_hicache_ext.cli.warm fill    --config CONFIG.json [--budget 100GiB]

CONFIG.json is the object given to --hicache-storage-backend-extra-config (path, master, ...).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_hicache_ext import warm
from sglang_hicache_ext.config import HiCacheExtConfig, parse_size
from sglang_hicache_ext.errors import ConfigError, HiCacheExtError
from sglang_hicache_ext.storage_backends import open_store

WIDTH = 30


def progress_line(report: warm.WarmReport) -> str:
    """One line: bar, pages, bytes and rate."""
    share = report.looked_at / max(1, report.total)
    bar = "#" * int(WIDTH * share)
    rate = report.kept_bytes / report.seconds / 1e9 if report.seconds else 0.0
    return f"[{bar:{WIDTH}}] {report.looked_at}/{report.total} pages, {report.kept_bytes >> 20} MiB, {rate:.2f} GB/s"


def fill(config: HiCacheExtConfig, budget: int | None) -> int:
    """Fill the near store; 0 when something or nothing was left to do, 1 when a tier failed."""
    near, far = open_store(config, "nvme"), open_store(config, "rdma")
    try:
        manifest = warm.fetch(far, config.namespace)
        if manifest is None:
            print("no manifest is published; run `publish` on a warm node first", file=sys.stderr)
            return 1
        is_terminal = sys.stderr.isatty()

        def show(report: warm.WarmReport) -> None:
            if is_terminal:
                print("\r" + progress_line(report), end="", file=sys.stderr, flush=True)

        report = warm.warm(near, far, manifest, budget_bytes=budget, on_progress=show)
        print(("\n" if is_terminal else "") + progress_line(report), file=sys.stderr)
        print(json.dumps(vars(report)))
        return 1 if report.ended_because == "far tier is down" else 0
    finally:
        near.close()
        far.close()


def publish(config: HiCacheExtConfig) -> int:
    """Publish the near store's pages as the manifest."""
    near, far = open_store(config, "nvme"), open_store(config, "rdma")
    try:
        manifest = warm.collect(near)
        done = warm.publish(far, manifest, config.namespace)
        print(json.dumps({"entries": len(manifest.entries), "is_published": done}))
        return 0 if done else 1
    finally:
        near.close()
        far.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on bad input."""
    parser = argparse.ArgumentParser(prog="hicache-ext warm", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=("publish", "fill"))
    parser.add_argument("--config", required=True, help="JSON file with the options of the backend")
    parser.add_argument(
        "--budget", default="", help="bytes to write, for example 100GiB; 80 %% of what is free by default"
    )
    args = parser.parse_args(argv)
    try:
        config = HiCacheExtConfig.parse(json.loads(Path(args.config).read_text()), args.config)
        if args.what == "publish":
            return publish(config)
        return fill(config, parse_size(args.budget, "--budget") if args.budget else None)
    except (OSError, json.JSONDecodeError) as error:
        print(f"error: {args.config}: {error}", file=sys.stderr)
    except (ConfigError, HiCacheExtError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
