"""Drives a contestant: timed batches, then, outside the timing, the proof that the bytes are right and were cold."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import (
    Arena,
    DeviceBytes,
    Measurement,
    Meter,
    Trial,
    drop_page_cache,
    page_keys,
    require_cold,
    require_cold_files,
)

from storage_bench.shape import BATCH_PAGES, Batch, Case, Contestant, batches

LATENCY_PAGES = 32
"""Pages read one by one for the page latency."""


class Callers:
    """``threads`` callers that live as long as the case, so that per-thread rings are made once."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "bench-caller") if threads > 1 else None

    def run(self, work: Callable[[Batch], None], todo: Sequence[Batch]) -> list[float]:
        """Call ``work`` for every batch; returns milliseconds of each call, in the order of the batches."""
        if self._pool is None:
            return [_timed_ms(work, b) for b in todo]
        shares = [todo[i :: self.threads] for i in range(self.threads)]
        futures = [self._pool.submit(lambda own: [_timed_ms(work, b) for b in own], s) for s in shares]
        return [ms for f in futures for ms in f.result()]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _timed_ms(work: Callable[[Batch], None], batch: Batch) -> float:
    begin = time.perf_counter()
    work(batch)
    return (time.perf_counter() - begin) * 1e3


@dataclass(slots=True)
class Bench:
    """One contestant in one case. ``read`` and ``write`` are the functions of an Arm."""

    contestant: Contestant
    case: Case
    arena: Arena
    path: str
    callers: Callers

    def read(self, trial: Trial) -> Measurement:
        """Read the whole data set once, cold; check every page."""
        case, keys = self.case, page_keys(self.case.pages, data_salt(self.case.page_bytes))
        rows = np.arange(case.pages)
        if case.order == "shuffled":
            rows = trial.rng.permutation(rows)
        todo = list(batches(keys, rows))
        how = self._make_cold()
        self.arena.blank()
        with DeviceBytes(self.path) as moved, Meter() as meter:
            batch_ms = self.callers.run(self.contestant.read, todo)
        order = keys if self.contestant.reads_in_place else [keys[int(r)] for r in rows]
        self.arena.require(order, what=f"{self.contestant.name} {case.name}")
        require_cold(case.sample_bytes, moved)
        page_ms = self._page_latency(trial, keys)
        facts = {"cold_by": how, **moved.facts(case.sample_bytes)}
        return _measured(case.sample_bytes, meter, {"batch_ms": batch_ms, "page_ms": page_ms}, facts)

    def _page_latency(self, trial: Trial, keys: list[bytes]) -> list[float]:
        rows = trial.rng.permutation(len(keys))[:LATENCY_PAGES]
        self._make_cold()
        todo = list(batches(keys, rows, size=1))
        with DeviceBytes(self.path) as moved:
            ms = [_timed_ms(self.contestant.read, b) for b in todo]
        require_cold(len(rows) * self.case.page_bytes, moved)
        return ms

    def _make_cold(self) -> str:
        files = self.contestant.files()
        how = drop_page_cache(files, sync=False)
        require_cold_files(files)
        return how

    def write(self, trial: Trial) -> Measurement:
        """Write fresh pages, then read a part back and check it."""
        case = self.case
        keys = page_keys(case.pages, f"write {case.name} {trial.seed}")
        self.arena.stamp(keys)
        todo = list(batches(keys, np.arange(case.pages)))
        with DeviceBytes(self.path) as moved, Meter() as meter:
            batch_ms = self.callers.run(self.contestant.write, todo)
        synced = Meter(meter.wall_s, meter.cpu_s)
        if self.contestant.is_buffered:
            with synced:
                os.sync()
        self._check_written(keys, trial)
        self.contestant.forget()
        facts = {"bytes_asked": case.sample_bytes, "bytes_to_device_in_time": moved.written_bytes}
        found = _measured(case.sample_bytes, meter, {"batch_ms": batch_ms}, facts)
        if self.contestant.is_buffered:
            found.values["synced_gb_s"] = case.sample_bytes / synced.wall_s / 1e9
        return found

    def _check_written(self, keys: list[bytes], trial: Trial) -> None:
        """Read a seeded part back; all of it where a page's place in the arena is not its own."""
        in_place = self.contestant.reads_in_place
        rows = np.arange(len(keys)) if in_place else np.sort(trial.rng.permutation(len(keys))[:BATCH_PAGES])
        self.arena.blank()
        for batch in batches(keys, rows):
            self.contestant.read(batch)
        self.arena.require([keys[int(r)] for r in rows], what=f"{self.contestant.name} {self.case.name}")

    def fill(self) -> None:
        """Write the data set that the read cases use, unless it is there."""
        keys = page_keys(self.case.pages, data_salt(self.case.page_bytes))
        todo = list(batches(keys, np.arange(self.case.pages)))
        if all(self.contestant.count_present(b) == len(b) for b in todo):
            return
        self.arena.stamp(keys)
        for batch in todo:
            self.contestant.write(batch)
        os.sync()  # from here on no read sample leaves dirty pages behind


def data_salt(page_bytes: int) -> str:
    return f"data set {page_bytes}"


def _measured(nbytes: int, meter: Meter, series: dict[str, list[float]], facts: dict[str, Any]) -> Measurement:
    gb = nbytes / 1e9
    values = {"gb_s": gb / meter.wall_s, "cpu_s_per_gb": meter.cpu_s / gb}
    return Measurement(values, series, facts)
