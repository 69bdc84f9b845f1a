"""kill -9 against a page store: a child writes stamped pages and dies, the parent looks at what is left.

The child is forked from a small server process that has the modules loaded, so a round costs milliseconds. What the
child acknowledged over a pipe was published; everything else may be lost, nothing may be wrong.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.testing.stamps import HostArena, page_keys

CHILD_TIMEOUT_S = 60.0
_ACK = struct.Struct("<QQ")
_MISSES = (Outcome.ABSENT, Outcome.EVICTED)


@dataclass(frozen=True)
class Writing:
    """What a child does: ``batches`` batches of ``batch`` pages, numbered from ``start``.

    Attributes:
        config: keys of HiCacheExtConfig.
        kill_point: the child kills itself there; "" never.
        kill_visit: at which visit of the point, from 1.
        read_share: probability that a batch is read back, so that reclaim finds pages to keep.
    """

    config: Mapping[str, Any]
    start: int
    batches: int = 1 << 30
    batch: int = 16
    page_bytes: int = 16_384
    kill_point: str = ""
    kill_visit: int = 1
    read_share: float = 0.0


def fingerprint() -> Fingerprint:
    return Fingerprint(model="crash")


def keys_of(first: int, count: int) -> list[bytes]:
    return page_keys(count, start=first, salt="crash")


def _child(work: Writing, acks: Connection) -> None:
    """Write until killed or done; acknowledge each published span (first page number, pages)."""
    from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

    visits = 0

    def point(name: str) -> None:
        nonlocal visits
        if name == work.kill_point:
            visits += 1
            if visits >= work.kill_visit:
                os.kill(os.getpid(), signal.SIGKILL)

    fd = acks.fileno()
    store = NvmeStore(HiCacheExtConfig.parse(work.config), point=point)
    ns = store.namespace(fingerprint())
    arena = HostArena(work.batch, (work.page_bytes // 2, work.page_bytes // 2))
    rng = random.Random(work.start)
    os.write(fd, _ACK.pack(work.start, 0))
    for number in range(work.batches):
        first = work.start + number * work.batch
        keys = keys_of(first, work.batch)
        outcomes = store.write(ns, keys, arena.fill(ns.id, keys)).outcomes
        if all(o.is_stored for o in outcomes):
            os.write(fd, _ACK.pack(first, work.batch))
        if rng.random() < work.read_share:
            store.read(ns, keys, arena.regions)
    store.close()


@dataclass
class Child:
    """A running child. Owner thread only."""

    process: BaseProcess
    acks: Connection

    def acknowledged(self) -> list[tuple[int, int]]:
        """(first page number, pages) of every published batch; call after the child ended."""
        raw = b""
        while part := os.read(self.acks.fileno(), 1 << 16):
            raw += part
        self.acks.close()
        return [span for span in _ACK.iter_unpack(raw[: len(raw) // _ACK.size * _ACK.size]) if span[1]]

    def await_start(self) -> None:
        """Block until the store is open in the child (or the child is gone)."""
        os.read(self.acks.fileno(), _ACK.size)

    def kill_after(self, seconds: float) -> None:
        self.process.join(seconds)
        self.process.kill()
        self.end()

    def end(self) -> None:
        self.process.join(CHILD_TIMEOUT_S)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError("a child hangs")


@dataclass
class Findings:
    """What is left after a kill."""

    loaded: int = 0
    missing: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class KillHarness:
    """Starts children on one store directory and verifies the directory afterwards.

    Args:
        config: keys of HiCacheExtConfig for children and verifier.
        page_bytes: bytes of a page, the same for all rounds.
    """

    def __init__(self, config: Mapping[str, Any], page_bytes: int = 16_384) -> None:
        self.config = dict(config)
        self.page_bytes = page_bytes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["sglang_hicache_ext.testing.crash", "sglang_hicache_ext.storage_backends.nvme.store"]
        )

    def start(self, start: int, **options: Any) -> Child:
        """Start a child that writes pages numbered from ``start``; options as in ``Writing``."""
        receiver, sender = self._context.Pipe(duplex=False)
        work = Writing(self.config, start, page_bytes=self.page_bytes, **options)
        process = self._context.Process(target=_child, args=(work, sender), daemon=True)
        process.start()
        sender.close()
        return Child(process, receiver)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

        store = NvmeStore(HiCacheExtConfig.parse(self.config))
        try:
            yield store
        finally:
            store.close()

    def verify(self, store: Any, numbers: Sequence[int], batch: int = 64) -> Findings:
        """Read pages by number: each is exact or a miss; anything else is reported as wrong."""
        found = Findings()
        ns = store.namespace(fingerprint())
        arena = HostArena(batch, (self.page_bytes // 2, self.page_bytes // 2))
        for at in range(0, len(numbers), batch):
            part = list(numbers[at : at + batch])
            keys = [keys_of(n, 1)[0] for n in part]
            present = store.contains(ns, keys)
            arena.poison()
            outcomes = store.read(ns, keys, arena.regions.slice(0, len(part))).outcomes
            for row, outcome in enumerate(outcomes):
                if outcome is Outcome.LOADED and arena.holds(row, ns.id, keys[row]):
                    found.loaded += 1
                elif outcome in _MISSES and not present[row]:
                    found.missing.append(part[row])
                else:
                    found.wrong.append(f"page {part[row]}: {outcome}, exists={bool(present[row])}")
        return found

    def accounting_errors(self, store: Any) -> list[str]:
        """What does not add up between the index, the counters and the disk; empty when all is right."""
        from sglang_hicache_ext.storage_backends.nvme.layout import extent_map_bytes

        errors = []
        layout = store.layout
        with store._index.read() as txn:  # one transaction: reclaim may run meanwhile
            rows = store._files.table.all(txn)
            pages = int(txn.stat(store._index.table(b"pages"))["entries"])
        on_disk = {int(p.stem) for d in range(len(layout.roots)) for p in layout.segment_dir(d).glob("*.seg")}
        if on_disk != {r.number for r in rows}:
            errors.append(f"segment files {sorted(on_disk)} but rows {sorted(r.number for r in rows)}")
        if sum(r.live for r in rows) != pages:
            errors.append(f"{sum(r.live for r in rows)} pages counted in segments, {pages} in the index")
        used, real = store.stats().used_bytes, sum(disk_bytes(str(root)) for root in layout.roots)
        if real > store.stats().capacity_bytes:
            errors.append(f"{real} bytes on disk, capacity {store.stats().capacity_bytes}")
        if not -65_536 <= real - used <= 65_536 + len(rows) * extent_map_bytes(layout.segment_bytes):
            errors.append(f"counter says {used} bytes, the disk {real}")
        return errors


def disk_bytes(root: str) -> int:
    """Bytes of all regular files under ``root`` as the file system counts them."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def wait_until(condition: Any, timeout_s: float = CHILD_TIMEOUT_S) -> bool:
    """Poll ``condition`` until it holds or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
