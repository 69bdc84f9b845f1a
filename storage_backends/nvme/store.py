"""NvmeStore: the PageStore on local drives. This file joins the parts; each part is a module beside it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import StoreClosedError, StoreError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.page import Regions, align_up, check_rows
from sglang_hicache_ext.ports import Clock, Namespace, ReadResult, StoreStats, SystemClock, WriteResult
from sglang_hicache_ext.storage_backends.engines import IoEngine, open_engine
from sglang_hicache_ext.storage_backends.nvme import recovery
from sglang_hicache_ext.storage_backends.nvme.bounce import BouncePool
from sglang_hicache_ext.storage_backends.nvme.changes import Changes
from sglang_hicache_ext.storage_backends.nvme.codes import (
    UNDECIDED,
    count_reads,
    count_writes,
    join_drains,
    read_outcomes,
    write_outcomes,
)
from sglang_hicache_ext.storage_backends.nvme.explain import Explainer
from sglang_hicache_ext.storage_backends.nvme.heat import Heat
from sglang_hicache_ext.storage_backends.nvme.index import PAGE, Index, split_key
from sglang_hicache_ext.storage_backends.nvme.lanes import Lanes
from sglang_hicache_ext.storage_backends.nvme.layout import load_or_create, opening, prepare
from sglang_hicache_ext.storage_backends.nvme.parts import StoreParts
from sglang_hicache_ext.storage_backends.nvme.presence import Presence
from sglang_hicache_ext.storage_backends.nvme.reader import ReadCall, Reader, draining_of
from sglang_hicache_ext.storage_backends.nvme.reclaim import Reclaim
from sglang_hicache_ext.storage_backends.nvme.reinsert import Mover
from sglang_hicache_ext.storage_backends.nvme.removal import Removal
from sglang_hicache_ext.storage_backends.nvme.segments import SegmentFiles
from sglang_hicache_ext.storage_backends.nvme.space import Space
from sglang_hicache_ext.storage_backends.nvme.survey import Survey
from sglang_hicache_ext.storage_backends.nvme.writer import Writer
from sglang_hicache_ext.storage_backends.nvme.writes import WriteCall

CLOSE_TIMEOUT_S = 5.0


def _no_point(name: str) -> None:
    """Tests put a function here that ends the process at a named point."""


class NvmeStore:
    """Pages in segment files on one or several directories, found through one shared index.

    Thread-safe; any number of processes may open the same directories with the same capacity. Not to be carried
    through a fork: only a spawned child can open it.
    """

    def __init__(
        self,
        config: HiCacheExtConfig,
        *,
        engine: IoEngine | None = None,
        engine_factory: Callable[[str], IoEngine] | None = None,
        clock: Clock | None = None,
        point: Callable[[str], None] = _no_point,
        is_tool: bool = False,
    ) -> None:
        """Open or create the store; recovers what a killed process left.

        Args:
            config: path, capacity, engine, durability, segment, hold_s, reinsert and the deadlines are read.
            engine: moves the bytes of all directories; owned, and closed with the store. None opens ``config.engine``.
            engine_factory: makes one engine per directory instead; they then run in parallel.
            clock: monotonic seconds, comparable between processes.
            point: called at named points of the write path; for crash tests.
            is_tool: reads leave no marks, so that checking a store does not make every page look wanted.

        Raises:
            ConfigError: bad path, capacity or segment. CapabilityError: the engine does not work there.
            StoreError: another process holds the opening lock for too long.
        """
        self._config = config
        self._clock = clock or SystemClock()
        self.metrics = Metrics()
        self._closed = False
        self._calls = 0
        self._idle = threading.Condition()
        self._numbers: dict[bytes, int] = {}
        roots = prepare(config)
        with contextlib.ExitStack() as undo:
            with opening(roots[0]):
                self.layout = load_or_create(config, roots)
                self._presence = Presence(self.layout)
                undo.callback(self._presence.close)
                self._index, self._heat = self._attach()
                self._heat.leaves_marks = not is_tool
                undo.callback(self._index.close)
                self._files = SegmentFiles(
                    self.layout, self._index, device_durable=config.durability == "device", point=point
                )
                if self._presence.is_alone:
                    recovery.reconcile(self.layout, self._index, self.metrics)
                self._files.seal_dead()
                self._presence.share()
            engines = self._open_engines(engine, engine_factory)
            self._lanes = Lanes(self.layout, engines)
            undo.callback(self._lanes.close)
            self._wire(point)
            undo.pop_all()

    def _attach(self) -> tuple[Index, Heat]:
        alone = self._presence.is_alone
        if alone:
            index = recovery.open_index(self.layout, self.metrics)
        else:
            index = Index(self.layout.index_dir, self.layout.map_bytes)
        try:
            return index, Heat(self.layout, fresh=alone)
        except BaseException:
            index.close()
            raise

    def _open_engines(self, engine: IoEngine | None, factory: Callable[[str], IoEngine] | None) -> list[IoEngine]:
        if engine is not None:
            return [engine]
        if factory is not None:
            return [factory(str(root)) for root in self.layout.roots]
        return [open_engine(self._config.engine, str(self.layout.segment_dir(0)), depth=self._config.io_depth)]

    def _wire(self, point: Callable[[str], None]) -> None:
        config, layout, metrics = self._config, self.layout, self.metrics
        self._bounce = BouncePool()
        self._reader = Reader(layout, self._index, self._heat, self._lanes, self._bounce, metrics)
        mover = Mover(self._reader, self._bounce, self._clock, config.write_deadline_s)
        self._reclaim = Reclaim(
            layout, self._files, self._index, self._heat, self._clock, metrics, point,
            mover.move if config.reinsert else None,
        )  # fmt: skip
        self._space = Space(layout, self._files, metrics, self._reclaim.free_one, moves=config.reinsert)
        self._writer = Writer(
            self._index, self._space, self._lanes, self._bounce, metrics,
            sync=config.durability == "device", point=point, index_full=self._make_index_room,
        )  # fmt: skip
        mover.connect(self._space, self._writer)
        self._removal = Removal(layout, self._index, self._files, self._heat)
        self._explainer = Explainer(self._index, self._heat)
        self.changes = Changes(self._index, self._number)

    def _make_index_room(self) -> bool:
        self._index.forget_dead_readers()
        freed = [self._space.free_one(d) for d in range(self._space.directories)]
        return any(freed)

    # -------------------------------------------------------------------------------------------- namespaces

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        """Register ``fingerprint`` (idempotent) and return its handle."""
        with self.call():
            ns = Namespace(fingerprint.namespace_id, fingerprint)
            self._number(ns)
            return ns

    def _number(self, ns: Namespace) -> int:
        number = self._numbers.get(ns.id)
        if number is None:
            words = ns.fingerprint.words()
            recovery.store_namespace(self.layout, ns.id, words)
            number = self._numbers[ns.id] = self._index.namespace_number(ns.id, words)
        return number

    def namespaces(self) -> list[Namespace]:
        """Every namespace on disk whose fingerprint is known in words."""
        with self.call():
            known = [(i, words) for i, _, words in self._index.namespaces() if words is not None]
            return [Namespace(ns_id, Fingerprint.from_words(words)) for ns_id, words in known]

    def iter_pages(self, ns: Namespace) -> Iterator[tuple[bytes, int]]:
        """(key, bytes) of each page of ``ns``; not a snapshot, each page at most once."""
        after = b""
        while True:
            with self.call():
                batch = self._index.scan(self._number(ns), after)
            if not batch:
                return
            after = batch[-1][0]
            for full, value in batch:
                yield split_key(full)[1], int(np.frombuffer(value, PAGE)["nbytes"][0])

    def survey(self) -> Survey:
        """Sums and pages per namespace, with age and heat; for tools."""
        return Survey(self.layout, self._index, self._heat)

    def number_of(self, ns_id: bytes) -> int | None:
        """The index number of a namespace id that is on disk; None when it is not."""
        return next((number for i, number, _ in self._index.namespaces() if i == ns_id), None)

    # -------------------------------------------------------------------------------------------- questions

    def contains(self, ns: Namespace, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """[keys] bool: published. One index transaction, no system call per key."""
        with self.call():
            return self._index.contains(self._number(ns), keys)

    def hit_pages(self, ns: Namespace, keys: Sequence[bytes], hold_s: float = 0.0) -> int:
        """Count the leading keys present; their segments are held against reclaim for ``hold_s`` seconds."""
        with self.call():
            number = self._number(ns)
            found, entries = self._index.lookup(number, keys)
            hits = int(np.argmin(found)) if not found.all() else len(keys)
            if hits and hold_s > 0:
                self._heat.hold(entries["segment"][:hits], self._clock.now() + hold_s)
            return hits

    def why_absent(self, ns: Namespace, keys: Sequence[bytes]) -> tuple[Outcome, ...]:
        """Classify keys: ABSENT, EVICTED or MISMATCH; LOADED where present."""
        return tuple(outcome for outcome, _ in self.explain(ns, keys))

    def explain(self, ns: Namespace, keys: Sequence[bytes]) -> list[tuple[Outcome, str]]:
        """``why_absent`` with one sentence per key; a MISMATCH names the differing fields."""
        with self.call():
            return self._explainer.explain(ns, self._number(ns), keys)

    # -------------------------------------------------------------------------------------------- pages

    def read(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> ReadResult:
        """Read pages into ``regions``; each is verified before it counts as LOADED."""
        check_rows(keys, regions)
        with self.call():
            started = time.monotonic()
            budget = self._config.read_deadline_s if deadline_s is None else deadline_s
            codes = np.full(len(keys), UNDECIDED, np.int8)
            call = ReadCall(ns.id, self._number(ns), keys, regions, started + budget, codes, [])
            if len(keys):
                self._reader.answer(call, lambda: self._explainer.decide(ns, call.number, keys, codes))
            ended = time.monotonic()
            counts = count_reads(codes)
            self.metrics.pages(counts)
            self.metrics.add("read_bytes", counts.get(Outcome.LOADED, 0) * regions.page_bytes)
            self.metrics.observe("read_batch_seconds", ended - started)
            draining, drain = draining_of(call)
            return ReadResult(read_outcomes(codes), draining, drain, max(0.0, ended - call.deadline))

    def write(
        self, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None = None
    ) -> WriteResult:
        """Write pages; each is published only after its bytes are in place."""
        check_rows(keys, regions)
        with self.call():
            started = time.monotonic()
            budget = self._config.write_deadline_s if deadline_s is None else deadline_s
            codes = np.full(len(keys), UNDECIDED, np.int8)
            call = WriteCall(ns.id, self._number(ns), keys, regions, started + budget, codes)
            if len(keys):
                self._writer.write(call)
            counts = count_writes(codes)
            self.metrics.writes(counts)
            self.metrics.add("written_bytes", counts.get(WriteOutcome.STORED, 0) * regions.page_bytes)
            self.metrics.observe("write_batch_seconds", time.monotonic() - started)
            draining = tuple(sorted(r for rows, _ in call.drains for r in rows))
            return WriteResult(write_outcomes(codes), draining, join_drains([d for rows, d in call.drains if rows]))

    def remove(self, ns: Namespace, keys: Sequence[bytes]) -> int:
        """Forget pages; returns how many were there. After losing the index they may be found again."""
        with self.call():
            return self._removal.remove(self._number(ns), keys)

    def clear(self, ns: Namespace | None = None) -> int:
        """Forget every page of ``ns`` (all when None); safe while I/O runs. The space stays the store's."""
        with self.call():
            return self._removal.clear(None if ns is None else self._number(ns))

    def verify(self, ns: Namespace, keys: Sequence[bytes], page_bytes: int) -> tuple[Outcome, ...]:
        """Read pages into memory of our own and say what each is; a corrupt one is removed."""
        out: list[Outcome] = []
        wave = self._bounce.pages_per_slot(align_up(page_bytes))
        for start in range(0, len(keys), wave):
            part = keys[start : start + wave]
            memory = np.empty((len(part), page_bytes), np.uint8)
            starts = np.uint64(memory.ctypes.data) + np.arange(len(part), dtype=np.uint64) * np.uint64(page_bytes)
            out += self.read(ns, part, Regions(starts[:, None], np.asarray([page_bytes], np.int64), memory)).outcomes
        return tuple(out)

    # -------------------------------------------------------------------------------------------- life

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Block until every accepted write is durable in the configured sense; False on timeout.

        A write call returns published pages only after that, so this waits for calls still running in other threads
        and for late I/O.
        """
        with self.call():
            deadline = time.monotonic() + timeout_s
            with self._idle:
                if not self._idle.wait_for(lambda: self._calls <= 1, timeout_s):
                    return False
            return all(d.wait(max(0.0, deadline - time.monotonic())) for d in self._space.drains())

    @property
    def used_bytes(self) -> int:
        """Bytes on disk at this instant: segments, index, heat and small files.

        Not the blocks in which the file system notes where a segment lies; the capacity has ``extent_map_bytes`` for them.
        """
        segments = len(self._files.table.snapshot()) * self.layout.segment_bytes
        return (
            segments + self._index.bytes_on_disk + align_up(self.layout.heat_bytes) + self._presence.small_files_bytes()
        )

    def stats(self) -> StoreStats:
        with self.call():
            counters = self.metrics.snapshot().counters
            return StoreStats(self._index.page_count(), self.used_bytes, self._config.capacity, counters)

    def describe(self) -> dict[str, Any]:
        """Requested and effective settings, JSON-ready."""
        layout = self.layout
        return {
            "store": "nvme",
            "path": [str(r) for r in layout.roots],
            "capacity_bytes": self._config.capacity,
            "segment_bytes": layout.segment_bytes,
            "max_segments": layout.max_segments,
            "index_limit_bytes": layout.map_bytes,
            "durability": self._config.durability,
            "preallocation": self._files.preallocation,
            "engine_requested": self._config.engine,
            "engine": self._lanes.all[0].engine.name,
            "engines": [lane.engine.describe() for lane in self._lanes.all],
        }

    def register_memory(self, addr: int, nbytes: int) -> bool:
        """Hand host memory to every engine for registration; False when one could not."""
        done = [lane.engine.register_memory(addr, nbytes) for lane in self._lanes.all]
        return all(done)

    def unregister_memory(self, addr: int) -> None:
        for lane in self._lanes.all:
            lane.engine.unregister_memory(addr)

    def close(self) -> None:
        """Idempotent; waits at most CLOSE_TIMEOUT_S for running calls. Later calls raise StoreClosedError."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            is_idle = self._idle.wait_for(lambda: self._calls == 0, CLOSE_TIMEOUT_S)
        if not is_idle:  # a stuck device: whoever opens the store next finds our locks gone with the process
            self.metrics.add("close_timeouts")
            return
        self._space.close()
        self._lanes.close()
        self._bounce.close()
        try:
            with opening(self.layout.roots[0], CLOSE_TIMEOUT_S):
                self._leave()
        except (OSError, StoreError, lmdb.Error):  # no clean mark then; this boot's page cache still vouches for it
            self._index.close()
        self._presence.close()
        self._heat.close()

    def _leave(self) -> None:
        """The last one to leave syncs the index and marks it clean."""
        self._presence.leave()
        if self._presence.is_alone:
            self._index.sync()
        if self._index.close() and self._presence.is_alone:
            recovery.mark_clean(self.layout.index_dir)

    def parts(self, ns: Namespace) -> StoreParts:
        """What other forms of reading (``layered_reads``) build on; used inside ``call``."""
        with self.call():
            return StoreParts(
                self._number(ns), self.layout, self._index, self._heat, self._lanes, self._reader, self._explainer
            )

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One use of the open store: ``close`` waits for it, and errors become StoreError."""
        with self._idle:
            if self._closed:
                raise StoreClosedError("the nvme store is closed")
            self._calls += 1
        try:
            yield
        except (lmdb.Error, OSError) as err:
            code = getattr(err, "errno", None) or 0
            raise StoreError("store call", str(err), path=str(self.layout.roots[0]), errno=code) from err
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()
