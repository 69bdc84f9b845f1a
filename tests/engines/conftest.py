"""Engines under test, aligned memory, and plans. Bytes of a page depend on its number, so that a swap shows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_hicache_ext.storage_backends.engines import IoEngine, IoPlan
from sglang_hicache_ext.storage_backends.engines.aiofiles_engine import AiofilesEngine
from sglang_hicache_ext.storage_backends.engines.io_uring import IoUringEngine
from sglang_hicache_ext.storage_backends.engines.posix import PosixEngine
from sglang_hicache_ext.testing.engine_faults import FaultyEngine

KVIKIO = os.environ.get("HICACHE_EXT_TEST_KVIKIO") == "1"
NAMES = ["kvikio"] if KVIKIO else ["io_uring", "io_uring-plain", "posix", "posix-buffered", "aiofiles", "faultless"]


def make(name: str, directory: str) -> IoEngine:
    if name == "kvikio":
        from sglang_hicache_ext.storage_backends.engines.kvikio_engine import KvikioEngine

        return KvikioEngine(directory)
    engines: dict[str, Callable[[], IoEngine]] = {
        "io_uring": lambda: IoUringEngine(depth=32),
        "io_uring-plain": lambda: IoUringEngine(depth=4, steps=(0,)),
        "posix": PosixEngine,
        "posix-buffered": lambda: PosixEngine(direct=False, threads=2),
        "aiofiles": AiofilesEngine,
        "faultless": lambda: FaultyEngine(PosixEngine()),
    }
    try:
        return engines[name]()
    except OSError as error:
        pytest.skip(f"{name} is not available here: {error}")


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IoEngine]:
    engine = make(request.param, str(tmp_path))
    yield engine
    engine.close()


@pytest.fixture
def memory() -> Callable[[int], np.ndarray]:
    """memory(nbytes) -> page-aligned uint8 array of zeros."""

    def allocate(nbytes: int) -> np.ndarray:
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)

    return allocate


def plan_of(
    handles: int | Sequence[int],
    offsets: Sequence[int],
    rows: Sequence[Sequence[tuple[int, int]]],
    owner: object = None,
) -> IoPlan:
    """rows[i]: the (address, bytes) pieces of operation i; ``owner`` keeps their memory."""
    files = np.full(len(offsets), handles) if isinstance(handles, int) else np.array(handles)
    flat = [piece for pieces in rows for piece in pieces]
    starts = np.cumsum([0, *(len(pieces) for pieces in rows)])
    return IoPlan(
        files.astype(np.int32),
        np.array(offsets, np.int64),
        starts.astype(np.int32),
        np.array(flat, np.uint64).reshape(-1, 2),
        owner,
    )


def paged(handle: int, pages: Sequence[int], page: int, array: np.ndarray, pieces: int = 1) -> IoPlan:
    """Operation i moves page pages[i] of the file from or to the i-th page of ``array``, in ``pieces`` parts that lie
    in as many separate stretches of it."""
    part, count = page // pieces, len(pages)
    at = [[(array.ctypes.data + p * part * count + i * part, part) for p in range(pieces)] for i in range(count)]
    return plan_of(handle, [number * page for number in pages], at, array)


def gather(array: np.ndarray, count: int, page: int, pieces: int = 1) -> np.ndarray:
    """[count, page] the pages that ``paged`` laid out in ``array``."""
    return array[: count * page].reshape(pieces, count, page // pieces).transpose(1, 0, 2).reshape(count, page)


@pytest.fixture
def kit() -> SimpleNamespace:
    return SimpleNamespace(plan_of=plan_of, paged=paged, gather=gather, make=make)


@pytest.fixture
def numbered_file(tmp_path: Path) -> Callable[[int, int], tuple[str, np.ndarray]]:
    """numbered_file(pages, page) -> (path, [pages, page] bytes): a file with other bytes in each page."""

    def write(pages: int, page: int, name: str = "data") -> tuple[str, np.ndarray]:
        content = np.random.default_rng(pages).integers(0, 256, (pages, page), dtype=np.uint8)
        path = tmp_path / name
        path.write_bytes(content.tobytes())
        return str(path), content

    return write
