"""How bytes get from a layered page into device memory: straight, through pinned memory, or by GPUDirect Storage."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hicache_ext.page import ALIGN, Regions
from sglang_hicache_ext.ports import Drain
from sglang_hicache_ext.sglang_adapter.linker_pools import DevicePool
from sglang_hicache_ext.storage_backends.nvme.codes import READ_CODE, join_drains
from sglang_hicache_ext.storage_backends.nvme.lanes import Lanes
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredRead, LayerResult

LATE = next(code for outcome, code in READ_CODE.items() if outcome.value == "late")
SLOT_BYTES = 8 << 20
SLOTS = 4


class LoadPath(Protocol):
    """Moves one layer of pages into a pool. Called from several loader threads at once.

    Attributes:
        name: "direct", "bounce" or "gds".
        lanes: engines of its own for the layers; None for the store's.
        writes_late: after its deadline a read may still write to device memory, until its drain is done.
    """

    name: str
    lanes: Lanes | None
    writes_late: bool

    def read_layer(
        self, read: LayeredRead, pool: DevicePool, layer: int, rows: NDArray[np.int64], deadline: float
    ) -> LayerResult:
        """Bring ``layer`` of all pages of ``read`` to ``rows``; returns when the bytes are in device memory."""
        ...

    def describe(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class DirectPath:
    """The engine writes into the pool itself: host memory that direct I/O can reach."""

    name = "direct"
    lanes: Lanes | None = None
    writes_late = True

    def read_layer(
        self, read: LayeredRead, pool: DevicePool, layer: int, rows: NDArray[np.int64], deadline: float
    ) -> LayerResult:
        return read.read_layer(layer, np.arange(len(rows)), pool.regions(layer, rows), deadline)

    def describe(self) -> dict[str, Any]:
        return {"path": self.name}

    def close(self) -> None:
        """Nothing is held."""


class Slot:
    """Page-aligned memory that one wave of pages passes through; pinned, by the context of ``device``, for CUDA."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):  # a thread starts on device 0
                raw = torch.empty(nbytes + ALIGN, dtype=torch.uint8, pin_memory=True)
        else:
            raw = torch.frombuffer(mmap.mmap(-1, nbytes + ALIGN), dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGN
        self.bytes = raw[start : start + nbytes]

    @property
    def addr(self) -> int:
        return int(self.bytes.data_ptr())


class BouncePath:
    """Into a bounded ring of our own, proven there, then copied; neighbours in the pool are copied together.

    A read that outlives its deadline writes into the ring only, so device slots are free at once.
    """

    name = "bounce"
    lanes: Lanes | None = None
    writes_late = False

    def __init__(self, pools: list[DevicePool], slots: int = SLOTS) -> None:
        largest = max(p.geometry.layer_bytes(layer) for p in pools for layer in range(p.geometry.layers))
        self._slot_bytes = max(SLOT_BYTES, largest)
        device = pools[0].device
        self._cuda = device.type == "cuda"
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for _ in range(slots):
            self._free.put(Slot(self._slot_bytes, device))
        self._streams = threading.local()
        self._device = device
        self._lock = threading.Lock()
        self._draining: list[tuple[Drain, Slot]] = []

    def read_layer(
        self, read: LayeredRead, pool: DevicePool, layer: int, rows: NDArray[np.int64], deadline: float
    ) -> LayerResult:
        wave = self._slot_bytes // pool.geometry.layer_bytes(layer)
        codes = np.full(len(rows), LATE, np.int8)
        flying: list[tuple[Any, Slot]] = []
        for start in range(0, len(rows), wave):
            at = np.arange(start, min(start + wave, len(rows)))
            if len(flying) >= 1:
                self._land(*flying.pop(0))
            slot = self._take(deadline)
            if slot is None:
                break
            place = _sections(slot, pool.geometry.runs[layer], len(at))
            result = read.read_layer(layer, at, place, deadline)
            codes[at] = result.codes
            if result.drain is not None:
                self._keep(result.drain, slot)
                break
            if not result.is_loaded:
                self._free.put(slot)
                break
            flying.append((self._copy(pool, layer, rows[at], slot), slot))
        for event, slot in flying:
            self._land(event, slot)
        return LayerResult(codes)

    def _take(self, deadline: float) -> Slot | None:
        self._collect()
        try:
            return self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _keep(self, drain: Drain, slot: Slot) -> None:
        with self._lock:
            self._draining.append((drain, slot))

    def _collect(self) -> None:
        with self._lock:
            done = [s for d, s in self._draining if d.is_done()]
            self._draining = [(d, s) for d, s in self._draining if not d.is_done()]
        for slot in done:
            self._free.put(slot)

    def _copy(self, pool: DevicePool, layer: int, rows: NDArray[np.int64], slot: Slot) -> Any:
        """Start the copies; returns what to wait for."""
        with self._stream():
            at = 0
            for buffer, run in zip(pool.buffers[layer], pool.geometry.runs[layer], strict=True):
                for first, count in neighbours(rows, pool.page_tokens):
                    start = at + first * run
                    target = buffer[int(rows[first]) : int(rows[first]) + count * pool.page_tokens]
                    target.view(-1).copy_(slot.bytes[start : start + count * run], non_blocking=True)
                at += len(rows) * run
            if not self._cuda:
                return None
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            return event

    def _stream(self) -> Any:
        if not self._cuda:
            return nullcontext()
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams.own)

    def _land(self, event: Any, slot: Slot) -> None:
        if event is not None:
            event.synchronize()
        self._free.put(slot)

    def describe(self) -> dict[str, Any]:
        return {"path": self.name, "slot_bytes": self._slot_bytes, "pinned": self._cuda}

    def close(self) -> None:
        with self._lock:
            join = join_drains([d for d, _ in self._draining])
        if join is not None:
            join.wait(1.0)


def _sections(slot: Slot, runs: tuple[int, ...], pages: int) -> Regions:
    """All pages' first runs, then all second ones: neighbours in the pool stay neighbours in the slot."""
    columns, at = [], slot.addr
    for run in runs:
        columns.append(np.uint64(at) + np.arange(pages, dtype=np.uint64) * np.uint64(run))
        at += pages * run
    return Regions(np.stack(columns, axis=1), np.asarray(runs, np.int64), slot)


def neighbours(rows: NDArray[np.int64], page_tokens: int) -> list[tuple[int, int]]:
    """(position, pages) of each stretch of pages that follow one another in the pool."""
    if not len(rows):
        return []
    starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1] + page_tokens)))
    return list(zip(starts.tolist(), np.diff(np.append(starts, len(rows))).tolist(), strict=True))
