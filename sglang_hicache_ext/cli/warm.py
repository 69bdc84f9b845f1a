"""`hicache-ext warm`: publish what a warm node holds, or fill a fresh node's NVMe from the remote tier.

    hicache-ext warm publish --config CONFIG.json
    hicache-ext warm fill    --config CONFIG.json [--budget 100GiB]

CONFIG.json is the object given to --hicache-storage-backend-extra-config (path, master, ...).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang_hicache_ext import warm
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError
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


def run(what: str, config_file: Path, budget_bytes: int | None) -> int:
    """Carry out "publish" or "fill" with the options in ``config_file``. Raises ConfigError."""
    try:
        raw = json.loads(config_file.read_text())
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read the config: {err}", str(config_file), "name a JSON file") from err
    config = HiCacheExtConfig.parse(raw, str(config_file))
    if what == "publish":
        return publish(config)
    if what == "fill":
        return fill(config, budget_bytes)
    raise ConfigError(f"warm {what!r} does not exist", "command line", "write publish or fill")
