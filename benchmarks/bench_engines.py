"""Engines against the raw ceiling: GB/s and CPU seconds per GB of random direct I/O, arms interleaved.

    python benchmarks/bench_engines.py --dir /mnt/nvme0 --page 32KiB --page 256KiB --rounds 5 --json out.json

Every arm moves the same batches of 128 pages between one prewritten file and aligned host memory. The ceiling is
the better of fio (io_uring, fixed buffers, registered file) and a bare loop over prebuilt submission entries. Files are
opened O_DIRECT, so that nothing comes from the page cache; an engine without direct I/O is reported as buffered.
After the timed rounds every arm reads one batch that is compared byte for byte.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.config import parse_size
from sglang_hicache_ext.storage_backends.engines import IoEngine, IoPlan, open_engine
from sglang_hicache_ext.storage_backends.engines.ring import Ring
from sglang_hicache_ext.storage_backends.engines.ring_batch import READ_FIXED, WRITE_FIXED

BATCH = 128
FIO_S = 1.0


@dataclass(frozen=True)
class Case:
    """One measurement: ``page`` bytes in ``pieces`` memory pieces; ``ops_per_page`` operations move one page."""

    path: Path
    file_bytes: int
    page: int
    pieces: int
    is_write: bool
    batches: int
    depth: int
    seed: int

    def pages(self) -> NDArray[np.int64]:
        """[batches, BATCH] random page numbers, the same for every arm of a round; a batch has no page twice."""
        rng, count = np.random.default_rng(self.seed), self.file_bytes // self.page
        return np.stack([rng.choice(count, BATCH, replace=False) for _ in range(self.batches)]).astype(np.int64)


class Arena:
    """Aligned host memory. A page's pieces lie in different halves, as K and V do in SGLang's host pool."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.bytes[:] = 1
        self.addr = self.bytes.ctypes.data

    def rows(self, case: Case) -> NDArray[np.uint64]:
        """[BATCH * pieces, 2] iov rows, page after page."""
        piece = case.page // case.pieces
        page, part = np.divmod(np.arange(BATCH * case.pieces), case.pieces)
        iov = np.empty((len(page), 2), np.uint64)
        iov[:, 0] = self.addr + part * (BATCH * piece) + page * piece
        iov[:, 1] = piece
        return iov


def prepare(path: Path, nbytes: int) -> None:
    """Write the test file once, every 4 KiB different."""
    if path.exists() and path.stat().st_size == nbytes:
        return
    rng = np.random.default_rng(0)
    block = rng.integers(0, 1 << 63, (1 << 20) // 8, dtype=np.uint64)
    with path.open("wb") as file:
        for i in range(nbytes >> 20):
            block[::512] = np.arange(len(block) // 512) + (i << 32)
            file.write(block.tobytes())
        file.flush()
        os.fsync(file.fileno())


Run = Callable[[Case, Arena], None]


def engine_arm(engine: IoEngine, split: bool) -> Run:
    """Batches through an engine; ``split`` asks for one operation per memory piece instead of one per page."""
    handles: dict[Path, int] = {}

    def run(case: Case, arena: Arena) -> None:
        handle = handles.setdefault(case.path, -1)
        if handle < 0:
            handle = handles[case.path] = engine.open_file(str(case.path))
        iov = arena.rows(case)
        per_op = 1 if split else case.pieces
        ops = BATCH * case.pieces // per_op
        starts = np.arange(0, len(iov) + 1, per_op, dtype=np.int32)
        files = np.full(ops, handle, np.int32)
        op_bytes = case.page // case.pieces * per_op
        within = np.tile(np.arange(case.page // op_bytes) * op_bytes, BATCH)
        call = engine.write if case.is_write else engine.read
        for pages in case.pages():
            offsets = np.repeat(pages * case.page, case.page // op_bytes) + within
            result = call(IoPlan(files, offsets, starts, iov, arena), 60.0)
            if not (result.res == op_bytes).all():
                raise SystemExit(f"{engine.name}: {sorted(set(result.res.tolist()))[:4]}")

    return run


def bare_arm(depth: int) -> Run:
    """The least a ring needs: prebuilt entries, registered file and memory, no per-operation results."""
    ring = Ring(depth)

    def run(case: Case, arena: Arena) -> None:
        fd = os.open(case.path, os.O_RDWR | os.O_DIRECT)
        table = np.array([fd], np.int32)
        memory = np.array([arena.addr, len(arena.bytes)], np.uint64)
        assert ring.register(2, table.ctypes.data, 1) >= 0
        assert ring.register(0, memory.ctypes.data, 1) >= 0
        entries = np.zeros((BATCH, 8), np.uint64)
        entries[:, 0] = (WRITE_FIXED if case.is_write else READ_FIXED) | 1 << 8
        entries[:, 2] = arena.addr + np.arange(BATCH) * case.page
        entries[:, 3] = case.page
        for pages in case.pages():
            entries[:, 1] = pages * case.page
            sent = done = 0
            while done < BATCH:
                room = min(BATCH - sent, depth - (sent - done))
                ring.push(entries[sent : sent + room])
                sent += room
                ring.wait(min(8, sent - done), 10.0)
                done += len(ring.reap()[0])
        ring.register(3, 0, 0)
        ring.register(1, 0, 0)
        os.close(fd)

    return run


def fio_gbps(case: Case) -> tuple[float, float]:
    """(GB/s, CPU s per GB) of fio with the same page size and depth on the same file."""
    command = [
        "fio", "--name=ceiling", f"--filename={case.path}", f"--bs={case.page}", f"--iodepth={case.depth}",
        f"--rw={'randwrite' if case.is_write else 'randread'}", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1",
        "--registerfiles=1", "--norandommap", "--time_based", f"--runtime={FIO_S}", "--thread", "--overwrite=1",
        f"--size={case.file_bytes}", "--output-format=json",
    ]  # fmt: skip
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    job = json.loads(out)["jobs"][0]
    side = job["write" if case.is_write else "read"]
    gbps = side["bw_bytes"] / 1e9
    return gbps, (job["usr_cpu"] + job["sys_cpu"]) / 100 / gbps


def timed(run: Run, case: Case, arena: Arena) -> tuple[float, float]:
    """(GB/s, CPU s per GB) of one arm, all its threads."""
    cpu, begin = time.process_time(), time.perf_counter()
    run(case, arena)
    gigabytes = case.batches * BATCH * case.page / 1e9
    return gigabytes / (time.perf_counter() - begin), (time.process_time() - cpu) / gigabytes


def verify(run: Run, case: Case, arena: Arena) -> None:
    """Read one batch through the arm and compare it with the file, piece by piece."""
    one = Case(case.path, case.file_bytes, case.page, case.pieces, False, 1, case.depth, case.seed + 1)
    arena.bytes[: BATCH * case.page] = 0
    run(one, arena)
    piece = case.page // case.pieces
    with case.path.open("rb") as file:
        for i, page in enumerate(one.pages()[0].tolist()):
            file.seek(page * case.page)
            wanted = np.frombuffer(file.read(case.page), np.uint8).reshape(case.pieces, piece)
            for part in range(case.pieces):
                at = part * BATCH * piece + i * piece
                if not np.array_equal(arena.bytes[at : at + piece], wanted[part]):
                    raise SystemExit(f"wrong bytes in page {page}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    directory = Path(args.dir)
    path, file_bytes = directory / "bench_engines.dat", parse_size(args.file, "--file")
    prepare(path, file_bytes)
    sizes = [parse_size(text, "--page") for text in args.page]
    arena = Arena(BATCH * max(sizes))
    arms: dict[str, Run] = {"bare": bare_arm(args.depth)}
    modes: dict[str, Any] = {}
    for name in args.engine:
        engine_name, *tags = name.split(":")
        engine = open_engine(engine_name, str(directory), depth=args.depth)
        if "registered" in tags:
            engine.register_memory(arena.addr, len(arena.bytes))
        arms[name] = engine_arm(engine, "split" in tags)
        modes[name] = engine
    rows = []
    for page in sizes:
        rows += measure_page(args, path, file_bytes, page, arena, arms)
    described = {name: engine.describe() for name, engine in modes.items()}
    for engine in modes.values():
        engine.close()
    machine = {"kernel": platform.release(), "cpus": os.cpu_count(), "python": platform.python_version()}
    return {"rows": rows, "engines": described, "machine": machine, "arguments": vars(args)}


def measure_page(
    args: argparse.Namespace, path: Path, file_bytes: int, page: int, arena: Arena, arms: dict[str, Run]
) -> list[dict[str, Any]]:
    batches = max(1, parse_size(args.bytes, "--bytes") // (BATCH * page))
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for number in range(args.rounds):
        case = Case(path, file_bytes, page, args.pieces, args.write, batches, args.depth, number)
        order = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        if shutil.which("fio"):
            samples.setdefault("fio", []).append(fio_gbps(case))
        for name in order:
            samples[name].append(timed(arms[name], case, arena))
    if not args.write:
        for name, run in arms.items():
            if name != "bare":
                verify(run, case, arena)
    ceiling = max(statistics.median(g for g, _ in samples[n]) for n in ("fio", "bare") if n in samples)
    return [
        {
            "page": page,
            "arm": name,
            "gbps": statistics.median(g for g, _ in got),
            "cpu_s_per_gb": statistics.median(c for _, c in got),
            "share": statistics.median(g for g, _ in got) / ceiling,
            "samples": got,
        }
        for name, got in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="directory on the drive to measure")
    parser.add_argument("--page", action="append", help="page size, may be given several times")
    parser.add_argument("--engine", action="append", help="engine[:registered][:split], may be given several times")
    parser.add_argument("--pieces", type=int, default=1, help="memory pieces of a page")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--bytes", default="512MiB", help="bytes per arm and round")
    parser.add_argument("--file", default="4GiB", help="size of the test file")
    parser.add_argument("--json", help="write raw samples and configuration here")
    args = parser.parse_args()
    args.page = args.page or ["32KiB", "256KiB", "2MiB"]
    args.engine = args.engine or ["io_uring", "io_uring:registered", "posix"]
    result = measure(args)
    print(f"{'page':>9} {'arm':24} {'GB/s':>6} {'share':>6} {'CPU s/GB':>9}")
    for row in result["rows"]:
        shown = f"{row['gbps']:6.2f} {row['share']:6.2f} {row['cpu_s_per_gb']:9.4f}"
        print(f"{row['page'] >> 10:>5} KiB {row['arm']:24} {shown}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
