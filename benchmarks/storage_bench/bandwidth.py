"""The bandwidth part: every contestant in every case, interleaved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Arena, Arm, Run

from sglang_hicache_ext.storage_backends.engines.probe import open_engine
from storage_bench.ceiling import BareLoop, Fio
from storage_bench.drive import Bench, Callers
from storage_bench.ours import ENGINES, Ours, WithoutHashing
from storage_bench.peers import SglangFile, SglangNixl
from storage_bench.shape import BATCH_PAGES, MIB, Case, Contestant, Unavailable, size_name

OURS = tuple(f"ours-{e}" for e in ENGINES)
CEILINGS = ("ceiling-fio", "ceiling-loop")
ARMS = (*OURS, "ours-nosum", "sglang-file", "nixl-uring", "nixl-default", *CEILINGS)
MANY_THREADS_SIZE = 256 << 10
HEADLINE_SIZES = (32 << 10, 256 << 10, 2 << 20)
"""Page sizes that the goals speak of: all arms, all rounds."""

MAIN_ARMS = ("ours-io_uring", "ours-posix", "sglang-file", "nixl-uring", *CEILINGS)
"""Arms of the other cases, unless everything is asked for."""

FEWER_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. ``sample_bytes`` may be overridden per page size by ``bytes_for``."""

    path: str
    sizes: Sequence[int]
    orders: Sequence[str]
    threads: Sequence[int]
    directions: Sequence[str]
    arms: Sequence[str]
    sample_bytes: int
    rounds: int
    is_smoke: bool = False
    is_full: bool = False

    def is_headline(self, case: Case) -> bool:
        return self.is_full or self.is_smoke or (case.page_bytes in HEADLINE_SIZES and case.threads == 1)

    def rounds_for(self, case: Case) -> int:
        return self.rounds if self.is_headline(case) else min(self.rounds, FEWER_ROUNDS)

    def takes_part(self, arm: str, case: Case) -> bool:
        """The hashing is replaced process-wide, so that arm takes one caller only."""
        if arm.endswith("-nosum"):
            return case.threads == 1 and case.page_bytes == MANY_THREADS_SIZE
        return self.is_headline(case) or arm in MAIN_ARMS

    def bytes_for(self, page_bytes: int) -> int:
        """Small pages take longer per byte: half a sample up to 64 KiB; of large ones at least a batch or two."""
        if self.is_smoke:
            return max(self.sample_bytes, 16 * page_bytes)
        wanted = self.sample_bytes // 2 if page_bytes <= 64 << 10 else self.sample_bytes
        return min(max(wanted, 2 * BATCH_PAGES * page_bytes), max(2 * self.sample_bytes, BATCH_PAGES * page_bytes))

    def cases(self, direction: str, page_bytes: int) -> Iterator[Case]:
        orders = self.orders if direction == "read" else ("sequential",)
        for threads in self.threads:
            if threads > 1 and page_bytes != MANY_THREADS_SIZE:
                continue
            for order in orders:
                yield Case(direction, page_bytes, order, threads, self.bytes_for(page_bytes))


def run_bandwidth(run: Run, plan: Plan) -> bool:
    """Measure all cases; False when the run is void."""
    for page_bytes in plan.sizes:
        for direction in plan.directions:
            cases = list(plan.cases(direction, page_bytes))
            arena = Arena(cases[0].pages, page_bytes)
            folder = os.path.join(plan.path, f"{direction}-{size_name(page_bytes)}")
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder, mode=0o700)
            contestants = _open_all(run, plan, folder, arena, cases[0])
            try:
                if not all(_measure(run, plan, case, contestants, arena, folder) for case in cases):
                    return False
            finally:
                for contestant in contestants:
                    contestant.close()
                shutil.rmtree(folder, ignore_errors=True)
    return True


def _open_all(run: Run, plan: Plan, folder: str, arena: Arena, case: Case) -> list[Contestant]:
    opened: list[Contestant] = []
    for name in (n for n in plan.arms if plan.takes_part(n, case)):
        maker = _maker(name, os.path.join(folder, name), arena, case)
        if maker is None:
            continue
        try:
            contestant = maker()
            if case.direction == "read":
                Bench(contestant, case, arena, plan.path, Callers(1)).fill()
            elif isinstance(contestant, Ours) and not plan.is_smoke:
                contestant.use_up(case.page_bytes)
            opened.append(contestant)
        except Unavailable as exc:
            if not any(n.startswith(f"{name} is not measured") for n in run.notes):
                run.notes.append(f"{name} is not measured: {exc}")
    return opened


def _maker(name: str, directory: str, arena: Arena, case: Case) -> Callable[[], Contestant] | None:
    os.makedirs(os.path.dirname(directory), mode=0o700, exist_ok=True)
    capacity = 2 * case.sample_bytes + 1024 * MIB
    if name == "ours-nosum":
        return lambda: WithoutHashing(directory, arena, "io_uring", capacity)
    if name in OURS:
        return lambda: Ours(directory, arena, name.removeprefix("ours-"), capacity)
    if name == "sglang-file":
        return lambda: SglangFile(_made(directory), arena)
    if name in ("nixl-uring", "nixl-default"):
        return lambda: SglangNixl(_made(directory), arena, name == "nixl-uring")
    if name == "ceiling-loop":
        return lambda: BareLoop(directory, case, arena, open_engine("auto", os.path.dirname(directory)))
    return None


def _made(directory: str) -> str:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    return directory


def _measure(run: Run, plan: Plan, case: Case, contestants: Sequence[Contestant], arena: Arena, folder: str) -> bool:
    callers = Callers(case.threads)
    arms = [_arm(c, case, arena, plan.path, callers) for c in contestants if plan.takes_part(c.name, case)]
    if "ceiling-fio" in plan.arms:
        try:
            fio = Fio(os.path.join(folder, "ceiling-fio"), case, arena)
            arms.append(Arm(fio.name, fio.run, fio.describe(), fio.describe))
        except Unavailable as exc:
            run.notes.append(f"ceiling-fio is not measured: {exc}")
    try:
        return run.measure(case.name, arms, plan.rounds_for(case), warm_up=0 if plan.is_smoke else 1)
    finally:
        callers.close()


def _arm(contestant: Contestant, case: Case, arena: Arena, path: str, callers: Callers) -> Arm:
    bench = Bench(contestant, case, arena, path, callers)
    requested: dict[str, Any] = getattr(contestant, "requested", {})
    work = bench.read if case.direction == "read" else bench.write
    return Arm(contestant.name, work, requested, contestant.describe, is_required=contestant.name.startswith("ours-"))
