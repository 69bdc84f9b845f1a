"""Loads, layer by layer: several batches take turns at the drive, a layer is complete when all its bytes are proven."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.ports import Drain

logger = logging.getLogger(__name__)

SLACK_S = 5.0
"""What a step may take beyond its deadline before the load counts as stuck."""
DRAIN_S = 30.0
"""How long ``finish`` waits for reads that outlived their deadline; their slots are then put in quarantine."""
OPEN = -1
"""The step before layer 0: where the pages lie, and what their layers must prove."""


class Counter(Protocol):
    """SGLang's LayerWiseLoadCounter, as far as it is used."""

    def complete(self, index: int, layer: int) -> None: ...
    def fail(self, index: int, error: BaseException) -> None: ...
    def finish(self, index: int) -> bool: ...


class Source(Protocol):
    """The pages of one batch in one pool. ``step`` is called by several threads for different layers."""

    def open(self, deadline: float) -> bool:
        """Look pages up; False when one is not there."""
        ...

    def layer(self, layer: int, deadline: float) -> tuple[bool, Drain | None]:
        """Read one layer of this pool; False when a page did not arrive. The drain covers device memory."""
        ...

    def close(self) -> Sequence[Outcome]:
        """Count every page once."""
        ...

    def quarantine(self, drain: Drain) -> None:
        """Keep this batch's slots out of use until ``drain`` is done."""
        ...


class LoadFailedError(Exception):
    """Reported to SGLang's counter only; it aborts the batch's loading requests."""


@dataclass(eq=False)
class Batch:
    """One call of ``start_layer_wise_loading``.

    Attributes:
        sources: pool name -> its pages.
        steps: for each layer of the model (pool, layer of the pool).
        ready: waited for before the first byte is written.
    """

    index: int
    sources: dict[str, Source]
    steps: tuple[tuple[str, int], ...]
    ready: Any = None
    next: int = OPEN
    running: int = 0
    progress: float = field(default_factory=time.monotonic)
    error: str = ""
    drains: list[tuple[Source, Drain]] = field(default_factory=list)
    is_closed: bool = False
    quiesced: threading.Event = field(default_factory=threading.Event)

    @property
    def has_step(self) -> bool:
        """The opening step runs alone; a failed batch starts nothing more."""
        return not self.error and self.next < len(self.steps) and not (self.next == 0 and self.running)

    @property
    def is_over(self) -> bool:
        return not self.running and (bool(self.error) or self.next >= len(self.steps))


class LoadQueue:
    """Thread-safe. ``submit`` and ``finish`` belong to SGLang's scheduler thread, the reads to loader threads.

    Args:
        counter: told of each layer.
        step_s: seconds one layer of a batch may take.
        threads: loader threads; with two, a layer is read while the last bytes of the one before are proven.
    """

    def __init__(self, counter: Counter, metrics: Metrics, *, step_s: float, threads: int, drain_s: float = DRAIN_S):
        self._counter, self._metrics = counter, metrics
        self._step_s, self._drain_s = step_s, drain_s
        self._changed = threading.Condition()
        self._active: deque[Batch] = deque()
        self._batches: dict[int, Batch] = {}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"hicache-load-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch) -> None:
        with self._changed:
            self._batches[batch.index] = batch
            self._active.append(batch)
            self._changed.notify_all()

    def finish(self, index: int) -> bool:
        """Block until no byte of the batch can move any more; True when every layer landed.

        Bounded: a batch without progress for ``2 * step_s`` is given up, and its slots stay out of use until its reads
        have ended.
        """
        batch = self._batches.pop(index, None)
        if batch is None:
            return self._counter.finish(index)
        while not batch.quiesced.wait(0.5):
            if time.monotonic() - batch.progress > 2 * self._step_s + SLACK_S:
                self._fail(batch, "a read hangs")
                break
        is_stuck = not batch.quiesced.is_set()
        self._settle_drains(batch, is_stuck)
        with self._changed:
            batch.is_closed = True
        return self._counter.finish(index)

    def _settle_drains(self, batch: Batch, is_stuck: bool) -> None:
        with self._changed:
            drains = list(batch.drains)
        if is_stuck:
            drains += [(source, _Quiesced(batch)) for source in batch.sources.values()]
        deadline = time.monotonic() + (0.0 if is_stuck else self._drain_s)
        for source, drain in drains:
            if not drain.wait(max(0.0, deadline - time.monotonic())):
                self._metrics.add("linker_quarantined_loads")
                logger.critical("a read into device memory does not end; its slots are withheld until it does")
                source.quarantine(drain)

    def stop_all(self, timeout_s: float) -> bool:
        """Start nothing more and wait for what runs; False when something still does."""
        with self._changed:
            batches = list(self._batches.values())
        for batch in batches:
            self._fail(batch, "the cache was reset")
        deadline = time.monotonic() + timeout_s
        done = True
        for batch in batches:
            done &= batch.quiesced.wait(max(0.0, deadline - time.monotonic()))
            self._settle_drains(batch, not batch.quiesced.is_set())
            with self._changed:
                batch.is_closed = True
            self._batches.pop(batch.index, None)
        return done

    def close(self, timeout_s: float = 5.0) -> None:
        self.stop_all(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    # ---- loader threads

    def _work(self) -> None:
        while (job := self._take()) is not None:
            batch, step = job
            error = ""
            drains: list[tuple[Source, Drain]] = []
            try:
                error, drains = self._run(batch, step)
            except StoreError as raised:
                error = str(raised)
            except Exception as raised:
                logger.exception("the linker failed in a load")
                error = f"{type(raised).__name__}: {raised}"
            self._done(batch, step, error, drains)

    def _take(self) -> tuple[Batch, int] | None:
        """The next step of the batch whose turn it is."""
        with self._changed:
            while True:
                if self._is_closed:
                    return None
                for _ in range(len(self._active)):
                    batch = self._active[0]
                    self._active.rotate(-1)
                    if batch.has_step:
                        step, batch.next = batch.next, batch.next + 1
                        batch.running += 1
                        return batch, step
                self._changed.wait(1.0)

    def _run(self, batch: Batch, step: int) -> tuple[str, list[tuple[Source, Drain]]]:
        deadline = time.monotonic() + self._step_s
        if step == OPEN:
            if batch.ready is not None:
                batch.ready.synchronize()
            good = all(source.open(deadline) for source in batch.sources.values())
            return ("" if good else "pages are gone", [])
        name, layer = batch.steps[step]
        source = batch.sources.get(name)
        if source is None:  # this load brings nothing for that pool
            return "", []
        started = time.monotonic()
        good, drain = source.layer(layer, deadline)
        self._metrics.observe("linker_layer_seconds", time.monotonic() - started)
        return ("" if good else f"layer {step} did not arrive", [] if drain is None else [(source, drain)])

    def _done(self, batch: Batch, step: int, error: str, drains: list[tuple[Source, Drain]]) -> None:
        with self._changed:
            batch.running -= 1
            batch.progress = time.monotonic()
            batch.drains += drains
            if not error and not batch.error and step != OPEN and not batch.is_closed:
                self._counter.complete(batch.index, step)
            over = batch.is_over
        if error:
            self._fail(batch, error)
        elif over:
            self._quiesce(batch)
        with self._changed:
            self._changed.notify_all()

    def _fail(self, batch: Batch, error: str) -> None:
        with self._changed:
            if not batch.error and not batch.quiesced.is_set():
                batch.error = error
                self._metrics.add("linker_failed_loads")
                if not batch.is_closed:
                    self._counter.fail(batch.index, LoadFailedError(error))
            over = batch.is_over
        if over:
            self._quiesce(batch)

    def _quiesce(self, batch: Batch) -> None:
        """No read of the batch is running any more: count its pages, once."""
        with self._changed:
            if batch not in self._active:
                return
            self._active.remove(batch)
        for source in batch.sources.values():
            source.close()
        if not batch.error:
            self._metrics.add("linker_loads")
        batch.quiesced.set()


class _Quiesced:
    """A drain that is done when a stuck batch has come to its end after all."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def is_done(self) -> bool:
        return self._batch.quiesced.is_set() and all(d.is_done() for _, d in self._batch.drains)

    def wait(self, timeout_s: float) -> bool:
        self._batch.quiesced.wait(timeout_s)
        return self.is_done()
