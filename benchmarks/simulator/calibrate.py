"""Numbers of drives and network from the JSON that bench_storage and bench_remote write; stated defaults without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_hicache_ext.errors import ConfigError
from simulator.cluster import ClusterSpec

DRIVE_CASES = {"drive_read_Bps": "read 256k sequential 1t", "drive_write_Bps": "write 256k sequential 1t"}


def read_result(path: str, benchmark: str) -> Mapping[str, Any]:
    """Load a result file of ``benchmark``. Raises ConfigError."""
    try:
        found = json.loads(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"cannot read the result: {e.strerror}", path, f"run benchmarks/{benchmark}.py --json") from e
    except ValueError as e:
        raise ConfigError("not JSON", path, f"give what benchmarks/{benchmark}.py --json wrote") from e
    if not isinstance(found, dict) or found.get("benchmark") != benchmark:
        name = found.get("benchmark") if isinstance(found, dict) else None
        raise ConfigError(f"a result of {name!r}", path, f"give what benchmarks/{benchmark}.py --json wrote")
    return found


def with_drive(spec: ClusterSpec, path: str) -> tuple[ClusterSpec, list[str]]:
    """Take bandwidths of one drive from a bench_storage result; returns what was taken, in words."""
    found = read_result(path, "bench_storage")
    arm = str(found.get("extra", {}).get("headline_arm", ""))
    taken: dict[str, float] = {}
    for name, case in DRIVE_CASES.items():
        speed = _median(found, case, arm, "gb_s")
        if speed:
            taken[name] = speed * 1e9
    words = [f"{name} {value / 1e9:.2f} GB/s, measured by {path} ({arm})" for name, value in taken.items()]
    read = taken.get("drive_read_Bps", spec.drive_read_Bps)
    write = taken.get("drive_write_Bps", spec.drive_write_Bps)
    return replace(spec, drive_read_Bps=read, drive_write_Bps=write), words or [
        f"{path} holds none of {', '.join(DRIVE_CASES.values())}: defaults kept"
    ]


def with_network(spec: ClusterSpec, path: str) -> tuple[ClusterSpec, list[str]]:
    """Cap a NIC by what the remote tier delivered in a bench_remote result."""
    found = read_result(path, "bench_remote")
    speeds = [
        row["metrics"]["gb_s"]["p50"]
        for row in found.get("table", ())
        if row.get("arm") == "ours" and "gb_s" in row.get("metrics", {})
    ]
    if not speeds:
        return spec, [f"{path} holds no bandwidth of arm 'ours': defaults kept"]
    measured = max(speeds) * 1e9
    return replace(spec, nic_Bps=min(spec.nic_Bps, measured)), [
        f"a node takes at most {measured / 1e9:.2f} GB/s from the remote tier, measured by {path}"
    ]


def _median(found: Mapping[str, Any], case: str, arm: str, metric: str) -> float:
    for row in found.get("table", ()):
        if row.get("case") == case and row.get("arm") == arm and metric in row.get("metrics", {}):
            return float(row["metrics"][metric]["p50"])
    return 0.0
