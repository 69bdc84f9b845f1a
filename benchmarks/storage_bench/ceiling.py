"""What the device can do: fio, and a bare loop over one file. Same page size, same depth, a file written before.

The ceiling of a case is the better of the two.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from harness import Arena, Measurement, Trial, page_keys

from sglang_hicache_ext.storage_backends.engines.base import IoEngine, IoPlan
from storage_bench.drive import data_salt
from storage_bench.shape import DEPTH, Batch, Case, Unavailable


def prewrite(path: str, case: Case, arena: Arena) -> str:
    """The file both ceilings use: every block allocated and written once, contents that do not compress."""
    if not os.path.exists(path):
        arena.stamp(page_keys(case.pages, data_salt(case.page_bytes)))
        with open(path, "wb", buffering=0) as file:
            view, done = memoryview(arena.array.data).cast("B"), 0
            while done < case.sample_bytes:
                done += file.write(view[done : min(case.sample_bytes, done + (64 << 20))])
            os.fsync(file.fileno())
    return path


class BareLoop:
    """One file, one operation a page, no store: the engine's own limit. Row r of the file is row r of the arena."""

    name = "ceiling-loop"
    reads_in_place = True
    is_buffered = False

    def __init__(self, path: str, case: Case, arena: Arena, engine: IoEngine) -> None:
        self._case, self._arena, self._engine = case, arena, engine
        self._path = prewrite(path, case, arena)
        self._file = engine.open_file(self._path)
        engine.register_memory(arena.addr, arena.array.nbytes)

    def _plan(self, batch: Batch) -> IoPlan:
        size = self._case.page_bytes
        offsets = batch.rows.astype(np.int64) * size
        iov = np.stack(
            (offsets.astype(np.uint64) + np.uint64(self._arena.addr), np.full(len(batch), size, np.uint64)), axis=1
        )
        files = np.full(len(batch), self._file, np.int32)
        return IoPlan(files, offsets, np.arange(len(batch) + 1, dtype=np.int32), iov, self._arena)

    def _require(self, moved: np.ndarray[Any, Any]) -> None:
        bad = moved[moved != self._case.page_bytes]
        if len(bad):
            raise RuntimeError(f"the bare loop moved {bad[0]} instead of {self._case.page_bytes} bytes")

    def write(self, batch: Batch) -> None:
        self._require(self._engine.write(self._plan(batch), 60.0).res)

    def read(self, batch: Batch) -> None:
        self._require(self._engine.read(self._plan(batch), 60.0).res)

    def count_present(self, batch: Batch) -> int:
        return len(batch)

    def forget(self) -> None:
        """The file is overwritten in place."""

    def files(self) -> list[Path]:
        return [Path(self._path)]

    def describe(self) -> dict[str, Any]:
        return {"file_bytes": self._case.sample_bytes, "engine": self._engine.describe()}

    def close(self) -> None:
        self._engine.close_file(self._file)
        self._engine.close()


class Fio:
    """fio with io_uring, O_DIRECT, registered files and buffers, on a prewritten file of its own."""

    name = "ceiling-fio"

    def __init__(self, path: str, case: Case, arena: Arena) -> None:
        if shutil.which("fio") is None:
            raise Unavailable("fio is not installed")
        self._case, self._path = case, prewrite(path, case, arena)

    def command(self) -> list[str]:
        case = self._case
        kind = ("rand" if case.order == "shuffled" else "") + case.direction
        share = case.sample_bytes // case.threads
        area = (
            [f"--size={case.sample_bytes}", f"--io_size={share}"]
            if case.order == "shuffled"
            else [f"--size={share}", f"--offset_increment={share}"]
        )
        return [
            "fio", "--name=ceiling", f"--filename={self._path}", f"--rw={kind}", f"--bs={case.page_bytes}",
            f"--iodepth={DEPTH}", f"--numjobs={case.threads}", *area, "--ioengine=io_uring", "--direct=1", "--thread",
            "--fixedbufs=1", "--registerfiles=1", "--overwrite=1", "--group_reporting", "--invalidate=1",
            "--refill_buffers=0", "--output-format=json",
        ]  # fmt: skip

    def run(self, trial: Trial) -> Measurement:
        """Run it once; CPU is fio's own user and system time."""
        command = [*self.command(), f"--randseed={trial.seed + 1}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"fio failed: {done.stderr.strip()[:300]}")
        job = json.loads(done.stdout)["jobs"][0]
        side = job[self._case.direction]
        wall_s, gb = side["runtime"] / 1e3, side["io_bytes"] / 1e9
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        percentiles = side["clat_ns"].get("percentile", {})
        facts = {
            "bytes_asked": self._case.sample_bytes,
            "io_bytes": side["io_bytes"],
            "queued_page_p50_ms": percentiles.get("50.000000", 0) / 1e6,
            "queued_page_p99_ms": percentiles.get("99.000000", 0) / 1e6,
        }
        return Measurement({"gb_s": gb / max(wall_s, 1e-3), "cpu_s_per_gb": cpu_s / gb}, {}, facts)

    def describe(self) -> dict[str, Any]:
        return {"command": " ".join(self.command())}
