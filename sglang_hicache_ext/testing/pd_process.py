"""The two ends as processes of their own, with stamped memory in a file that a test can look into while they are stopped.

    python -m sglang_hicache_ext.testing.pd_process '{"role": "prefill", "memory": "/dev/shm/x", ...}'

Commands come as JSON lines on stdin, answers go as JSON lines to stdout.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import HiCacheExtError
from sglang_hicache_ext.pd.decode import DecodeEndpoint, DecodeLoad
from sglang_hicache_ext.pd.drivers import make_transport
from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer
from sglang_hicache_ext.pd.hooks import Chunk, LoadRequest, LoadState, Reservation, SendState
from sglang_hicache_ext.pd.prefill import PrefillEndpoint
from sglang_hicache_ext.pd.settings import PdSettings

POISON = -1
ENDED = (LoadState.FAILED, LoadState.TIMED_OUT, LoadState.ABORTED)


@dataclass(frozen=True)
class Shape:
    """Of the memory: ``layers`` layers with K and V, ``slots`` pages of ``page_words`` int64 each; one extra word a slot."""

    layers: int = 4
    slots: int = 64
    page_words: int = 512

    @property
    def words(self) -> int:
        return (2 * self.layers * self.page_words + 8) * self.slots


class StampedPool:
    """One side's pages. ``pages`` is [layers, K|V, slots, words]; a stamp says room, layer, K or V, and position."""

    def __init__(self, path: str, shape: Shape, *, is_new: bool = True) -> None:
        self.shape = shape
        memory = np.memmap(path, np.int64, "w+" if is_new else "r+", shape=(shape.words,))
        if is_new:
            memory[:] = POISON
        count = 2 * shape.layers * shape.page_words * shape.slots
        self.pages: NDArray[np.int64] = memory[:count].reshape(shape.layers, 2, shape.slots, shape.page_words)
        self.extra: NDArray[np.int64] = memory[count:].reshape(shape.slots, 8)
        self.free = list(range(shape.slots))
        random.Random(path).shuffle(self.free)

    def geometry(self, facts: dict[str, str] | None = None) -> Geometry:
        rows = [
            LayerBuffer(
                f"{'kv'[half]}.{layer}",
                layer,
                self.pages[layer, half].ctypes.data,
                8 * self.shape.page_words,
                self.shape.slots,
            )
            for layer in range(self.shape.layers)
            for half in (0, 1)
        ]
        extra = LayerBuffer("first_token", self.shape.layers, self.extra.ctypes.data, 64, self.shape.slots, "aux")
        return Geometry((*rows, extra), {"dtype": "int64", **(facts or {})})

    def stamp(self, room: int, layer: int, slot: int, position: int) -> None:
        for half in (0, 1):
            self.pages[layer, half, slot] = (room << 20) | (layer << 13) | (half << 12) | position

    def foreign(self, room: int, slots: list[int]) -> int:
        """Pages of ``slots`` that do not carry exactly the stamps of ``room``, over all layers, and the extra item."""
        wrong = int((self.extra[slots[0]] != room).any())
        for layer in range(self.shape.layers):
            for half in (0, 1):
                want = (room << 20) | (layer << 13) | (half << 12) | np.arange(len(slots))[:, None]
                wrong += int((self.pages[layer, half, slots] != want).any(axis=1).sum())
        return wrong

    def dirty(self, slots: list[int]) -> int:
        """Free pages that somebody has written to."""
        return int(
            (self.pages[:, :, slots] != POISON).any(axis=(0, 1, 3)).sum()
            + (self.extra[slots] != POISON).any(axis=1).sum()
        )

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, slots: list[int]) -> None:
        self.pages[:, :, slots] = POISON
        self.extra[slots] = POISON
        self.free += slots


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


# ----------------------------------------------------------------------------------------------------------- prefill


@dataclass(eq=False)
class _Sending:
    reservation: Reservation
    slots: list[int]
    drain: Any = None


class PrefillProcess:
    """Serves every reservation: stamps its pages layer by layer in one or several chunks.

    Options: ``hold`` stops the work on a request at "reserved", "layer" (one layer saved) or "finished";
    ``abort_rate`` and ``seed``; ``layer_s`` seconds of computing per layer.
    """

    def __init__(self, end: PrefillEndpoint, pool: StampedPool, options: dict[str, Any]) -> None:
        self.end, self.pool, self.options = end, pool, options
        self.rng = random.Random(options.get("seed", 0))
        self.sendings: list[_Sending] = []
        self.seen: set[Any] = set()
        self.dirty = 0

    def round(self) -> None:
        for room in self.end.rooms:
            for reservation in self.end.reservations(room):
                if reservation.key not in self.seen and len(self.pool.free) >= max(1, len(reservation.pages)):
                    self.seen.add(reservation.key)
                    self.serve(reservation)
        for sending in list(self.sendings):
            status = self.end.status(sending.reservation.key)
            if status.state is SendState.OPEN:
                continue
            if sending.drain is None:
                sending.drain = self.end.drain(sending.reservation.key)
                self.end.forget(sending.reservation.key)
                say(event="sent", room=sending.reservation.key.room, state=status.state, reason=status.reason)
            if sending.drain.is_done():
                self.pool.give(sending.slots)
                self.sendings.remove(sending)

    def serve(self, reservation: Reservation) -> None:
        key, count = reservation.key, len(reservation.pages)
        slots = self.pool.take(max(1, count))
        self.dirty += self.pool.dirty(slots)
        self.sendings.append(_Sending(reservation, slots))
        hold = self.options.get("hold", "")
        if hold == "reserved":
            say(event="held", room=key.room)
            return
        cut = self.rng.randint(0, count)
        for start, stop, is_last in ((0, cut, False), (cut, count, True)):
            forward = self.end.start_save_kv(
                [
                    Chunk(
                        key,
                        start,
                        np.array(slots[start:stop], np.int64),
                        is_last,
                        {"aux": np.array(slots[:1])} if is_last else {},
                    )
                ]
            )
            for layer in range(self.pool.shape.layers):
                for at in range(start, stop):
                    self.pool.stamp(key.room, layer, slots[at], at)
                time.sleep(self.options.get("layer_s", 0.0))
                forward.save_kv_layer(layer)
                if hold == "layer":
                    say(event="held", room=key.room)
                    return
                if self.rng.random() < self.options.get("abort_rate", 0.0) / self.pool.shape.layers:
                    self.end.abort(key, "prefill gave it up")
                    return
            self.pool.extra[slots[0]] = key.room
            forward.finish()
        if hold == "finished":
            say(event="held", room=key.room)

    def on_command(self, words: dict[str, Any]) -> None:
        self.options.update(words)
        say(
            event="ok",
            address=self.end.address,
            dirty=self.dirty,
            free=len(self.pool.free),
            open=self.end.describe()["open_sends"],
        )


# ------------------------------------------------------------------------------------------------------------ decode


@dataclass(eq=False)
class _Loading:
    load: DecodeLoad
    room: int
    slots: list[int]
    abort_at: float = float("inf")
    drain: Any = None


@dataclass
class DecodeProcess:
    """Loads what it is told to, or ``storm``: many small loads through few slots, some of them aborted."""

    end: DecodeEndpoint
    pool: StampedPool
    options: dict[str, Any]
    loadings: list[_Loading] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("complete", "ended", "foreign", "dirty"), 0))
    peer: str = ""

    def on_command(self, words: dict[str, Any]) -> None:
        name = words["do"]
        if name == "connect":
            try:
                self.peer = self.end.connect(words["address"], words.get("timeout_s", 20.0))
                say(event="connected", peer=self.peer)
            except HiCacheExtError as e:
                say(event="refused", error=f"{type(e).__name__}: {e}")
        elif name == "load":
            self.start(words["room"], words["pages"], words["deadline_s"])
        elif name == "abort":
            for loading in self.loadings:
                if loading.room == words["room"]:
                    loading.load.abort("told to")
        elif name == "state":
            say(event="state", free=len(self.pool.free), quarantined=self.end.quarantined_pages, **self.counts)
        elif name == "storm":
            self.storm(words["count"], words["abort_rate"], words.get("seed", 1))

    def start(self, room: int, pages: int, deadline_s: float) -> _Loading:
        slots = self.pool.take(pages)
        self.counts["dirty"] += self.pool.dirty(slots)
        request = LoadRequest(self.peer, room, np.array(slots), deadline_s, {"aux": np.array(slots[:1])})
        self.loadings.append(_Loading(self.end.start_load_kv(request), room, slots))
        return self.loadings[-1]

    def round(self) -> None:
        for one in list(self.loadings):
            status = one.load.status()
            if one.drain is None and status.state is LoadState.COMPLETE:
                foreign = self.pool.foreign(one.room, one.slots)
                one.load.publish()
                self.counts["complete"] += 1
                self.counts["foreign"] += foreign
                self.over(one, status.state, "", foreign)
                self.finish(one)
            elif one.drain is None and status.state in ENDED:
                self.counts["ended"] += 1
                one.drain = one.load.release()
                self.over(one, status.state, status.reason, 0)
            elif one.drain is not None and one.drain.is_done():
                self.finish(one)
            elif time.monotonic() > one.abort_at:
                one.load.abort("the client left")

    def over(self, one: _Loading, state: str, reason: str, foreign: int) -> None:
        if self.options.get("is_loud", True):
            say(event="load", room=one.room, state=state, reason=reason, foreign=foreign, slots=one.slots)

    def finish(self, one: _Loading) -> None:
        self.loadings.remove(one)
        self.pool.give(one.slots)

    def storm(self, count: int, abort_rate: float, seed: int) -> None:
        rng, room = random.Random(seed), 0
        self.options["is_loud"] = False
        deadline = time.monotonic() + 100.0
        while (room < count or self.loadings) and time.monotonic() < deadline:
            pages = rng.randint(1, 12)
            if room < count and len(self.pool.free) >= pages:
                room += 1
                one = self.start(room, pages, 20.0)
                if rng.random() < abort_rate:
                    one.abort_at = time.monotonic() + rng.uniform(0, 0.02)
            else:
                time.sleep(0.0005)
            self.round()
        say(event="storm", started=room, open=len(self.loadings), free=len(self.pool.free), **self.counts)


# --------------------------------------------------------------------------------------------------------------- run


def _commands() -> queue.SimpleQueue[dict[str, Any] | None]:
    inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            inbox.put(json.loads(line))
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    return inbox


def _serve(worker: PrefillProcess | DecodeProcess, inbox: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    while True:
        try:
            words = inbox.get(timeout=0.001)
        except queue.Empty:
            worker.round()
            continue
        if words is None:
            return
        worker.on_command(words)


def main(text: str) -> int:
    options = json.loads(text)
    pool = StampedPool(options["memory"], Shape(**options.get("shape", {})))
    settings = PdSettings.parse(options.get("settings", {}))
    make: Callable[..., Any] = PrefillEndpoint if options["role"] == "prefill" else DecodeEndpoint
    try:
        end = make(pool.geometry(options.get("facts")), make_transport(settings), settings)
    except HiCacheExtError as e:
        say(event="refused", error=f"{type(e).__name__}: {e}")
        return 2
    say(event="up", address=end.address, instance=end.instance)
    worker = PrefillProcess(end, pool, options) if options["role"] == "prefill" else DecodeProcess(end, pool, options)
    try:
        _serve(worker, _commands())
    finally:
        end.close(timeout_s=2.0)
        if Path(options["memory"]).exists():
            Path(options["memory"]).unlink()
    return int(options.get("exit", 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
