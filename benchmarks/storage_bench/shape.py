"""What is measured: cases, the batches of a case, and what a contestant must be able to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BATCH_PAGES = 128
"""Pages of one call, as SGLang's controller makes them (sglang 0.5.23 hicache_storage.py, STORAGE_BATCH_SIZE)."""

DEPTH = 32
"""Operations in flight per thread, for ours and for the ceiling."""


class Unavailable(Exception):
    """This contestant cannot run here; the message says why. Shown in the result, not a failure."""


def size_name(nbytes: int) -> str:
    """``16k``, ``2m``: as in the names of the summary."""
    return f"{nbytes // MIB}m" if nbytes >= MIB else f"{nbytes // KIB}k"


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the experiment.

    Attributes:
        direction: "read" or "write".
        page_bytes: bytes of a page, half K, half V.
        order: "sequential" is the order in which the pages were written; "shuffled" is random.
        threads: callers at once.
        sample_bytes: bytes moved by one sample.
    """

    direction: str
    page_bytes: int
    order: str
    threads: int
    sample_bytes: int

    @property
    def name(self) -> str:
        return f"{self.direction} {size_name(self.page_bytes)} {self.order} {self.threads}t"

    @property
    def pages(self) -> int:
        return self.sample_bytes // self.page_bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """Up to BATCH_PAGES pages for one call.

    Attributes:
        keys: raw keys; ``names`` are the same in hex, as SGLang's stores take them.
        rows: position of each page in the data set (where the raw file has it).
        start: first page of the arena that they go to (come from).
    """

    keys: list[bytes]
    names: list[str]
    rows: NDArray[np.int64]
    start: int

    def __len__(self) -> int:
        return len(self.keys)


def batches(keys: Sequence[bytes], rows: NDArray[np.int64], size: int = BATCH_PAGES) -> Iterator[Batch]:
    """Cut ``rows`` of the data set ``keys`` into batches that fill the arena from its start on."""
    for start in range(0, len(rows), size):
        own = rows[start : start + size]
        mine = [keys[int(r)] for r in own]
        yield Batch(mine, [k.hex() for k in mine], own, start)


class Contestant(Protocol):
    """A page store under test. Calls move the pages of a batch between the store and the arena.

    A page that is refused or missing raises RuntimeError: it is a failed sample.
    """

    name: str
    reads_in_place: bool
    """True when a read puts the page at its place in the data set instead of at the batch's place."""
    is_buffered: bool
    """True when a write leaves its bytes in the page cache: the time to get them to the device is shown too."""

    def write(self, batch: Batch) -> None: ...

    def read(self, batch: Batch) -> None: ...

    def count_present(self, batch: Batch) -> int: ...

    def forget(self) -> None:
        """Make room after a write sample, outside the timing."""
        ...

    def files(self) -> list[Path]: ...

    def describe(self) -> dict[str, Any]: ...

    def close(self) -> None: ...
