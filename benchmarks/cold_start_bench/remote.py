"""The experiment against a running server: first contact computes, then the caches above storage are flushed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from harness import BadInput, Progress, Run, Sample, WarmRead, WrongBytes

from cold_start_bench.client import Client
from cold_start_bench.points import Point, as_measurement, measure_point, require_cold, require_same_tokens

FLUSH_LIMIT_S = 60.0


def connect(url: str, key: str) -> tuple[Client, str, dict[str, Any]]:
    """The server, the name of its store, what it says it is. Raises BadInput unless it is SGLang with an L3."""
    client = Client(url, key)
    info = client.server_info()
    name = str(info.get("hicache_storage_backend") or "")
    if info.get("enable_unified_cache_external_linker"):
        client, name = Client(url, key, storage_tier="host"), "linker"
    if not name:
        raise BadInput(
            f"--url {url} serves without an L3 storage backend; start it with --enable-hierarchical-cache "
            "--hicache-storage-backend nvme (or file, nixl), or with a linker"
        )
    if not info.get("enable_cache_report"):
        raise BadInput(f"--url {url} does not report cached tokens; start it with --enable-cache-report")
    return client, name, info


def measure_server(
    run: Run, client: Client, name: str, points: Sequence[Point], rounds: int, new_tokens: int, settle_s: float
) -> bool:
    """Two arms on one server: ``recompute`` is the first contact with fresh prompts, ``name`` the one after a flush.

    The page cache of the server's machine is not ours to drop, so cold means: not on the GPU, not in host memory.
    """
    progress = Progress(rounds * len(points) * 2)
    try:
        for round_index in range(rounds):
            for point in points:
                salt = time.time_ns()  # prompts that no earlier run can have stored
                progress.step(f"{point.case}: first contact")
                first = measure_point(client, point, salt, new_tokens)
                _record(run, point, "recompute", round_index, first)
                _flush(client, settle_s)
                progress.step(f"{point.case}: after the flush")
                again = measure_point(client, point, salt, new_tokens)
                require_cold(again, point.case)
                if point.callers == 1:
                    for (want, _), (have, _) in zip(first, again, strict=True):
                        require_same_tokens(want, have, point.case)
                _record(run, point, name, round_index, again)
    except (WrongBytes, WarmRead) as exc:
        run.fail(exc)
        return False
    finally:
        progress.end()
    return True


def _record(run: Run, point: Point, arm: str, round_index: int, done: Any) -> None:
    begin = time.time()
    try:
        found, error = as_measurement(point, done), ""
    except RuntimeError as exc:
        found, error = None, str(exc)
        run.failures.append(f"{point.case}, {arm}: {exc}")
    run.samples.append(
        Sample(
            point.case, arm, round_index, 0, begin, sum(s for _, s in done),
            found.values if found else {}, found.series if found else {}, found.facts if found else {}, error,
        )
    )  # fmt: skip


def _flush(client: Client, settle_s: float) -> None:
    """Let the write-behind finish, then empty GPU and host caches; the server refuses while it is busy."""
    time.sleep(settle_s)
    deadline = time.monotonic() + FLUSH_LIMIT_S
    while True:
        try:
            client.call("POST", "/flush_cache", limit_s=30)
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise BadInput(
                    f"--url {client.url}: /flush_cache is refused ({exc}); give --key, or stop other load"
                ) from exc
            time.sleep(0.5)
