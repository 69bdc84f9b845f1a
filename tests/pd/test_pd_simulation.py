"""Seeded runs of both ends over a network that delays, reorders, breaks, stops and kills, against models of the two engines.

The models check what the hooks promise: a published page holds exactly its request's bytes of every layer; a page given
back holds still; a source page given back is never read into a page that counts; and everything comes to rest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext.pd.decode import DecodeEndpoint
from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer
from sglang_hicache_ext.pd.hooks import Chunk, LoadRequest, LoadState, SendState
from sglang_hicache_ext.pd.outgoing import ChunkSend, Send
from sglang_hicache_ext.pd.prefill import PrefillEndpoint
from sglang_hicache_ext.pd.receiving import Landing, Receiver
from sglang_hicache_ext.pd.settings import PdSettings
from sglang_hicache_ext.pd.wire import FrameType, pack_words
from sglang_hicache_ext.testing.clock import ManualClock
from sglang_hicache_ext.testing.pd_sim import SimLinks, SimNet, SimTransport

LAYERS, SLOTS, WORDS = 4, 12, 4
"""Three target layers and one of a draft model; hidden states of the draft and the first token travel as extra items."""
POISON = 0xDEAD


def stamp(room: int, epoch: int, layer: int, position: int) -> int:
    return hash((room, epoch, layer, position)) & ((1 << 62) - 1)


class Pool:
    """One side's memory and free list."""

    def __init__(self) -> None:
        self.layers = np.full((LAYERS, SLOTS, WORDS), POISON, np.int64)
        self.extra = np.full((SLOTS, WORDS), POISON, np.int64)
        self.free = set(range(SLOTS))
        self.free_extra = set(range(SLOTS))

    def geometry(self) -> Geometry:
        rows = [
            LayerBuffer(f"kv.{i}" if i < LAYERS - 1 else "draft.kv.0", i, self.layers[i].ctypes.data, 8 * WORDS, SLOTS)
            for i in range(LAYERS)
        ]
        extra = LayerBuffer("draft_hidden", LAYERS, self.extra.ctypes.data, 8 * WORDS, SLOTS, "aux")
        return Geometry((*rows, extra), {"dtype": "int64"})

    def take(self, count: int) -> tuple[list[int], int]:
        pages = [self.free.pop() for _ in range(count)]
        assert (self.layers[:, pages] == POISON).all(), "a free page was written to"
        item = self.free_extra.pop()
        assert (self.extra[item] == POISON).all(), "a free extra item was written to"
        return pages, item

    def give(self, pages: list[int], item: int) -> None:
        self.layers[:, pages] = POISON
        self.extra[item] = POISON
        self.free |= set(pages)
        self.free_extra.add(item)


@dataclass(eq=False)
class LoadJob:
    load: Any
    pages: list[int]
    item: int
    drain: Any = None


@dataclass(eq=False)
class SendJob:
    key: Any
    pages: list[int]
    item: int
    cuts: list[int]
    forward: Any = None
    layers: list[int] = field(default_factory=list)
    span: tuple[int, int] = (0, 0)
    drain: Any = None


class World:
    def __init__(self, seed: int, carries_notes: bool) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.net = SimNet(seed, self.clock, carries_notes=carries_notes, fault_rate=self.rng.choice([0.0, 0.0, 0.02]))
        self.settings = PdSettings(
            group=self.rng.choice([1, 200, 1 << 20]),
            layered_min=self.rng.choice([0, 1 << 20]),
            deadline_s=3.0,
            drain_s=1.0,
        )
        self.born, self.room, self.published = 0, 0, 0
        self.loads: list[LoadJob] = []
        self.sends: list[SendJob] = []
        self.new_prefill()
        self.new_decode()

    # -------------------------------------------------------------------------------------------------- processes

    def new_prefill(self) -> None:
        self.born += 1
        self.source, self.sends = Pool(), []
        name = f"prefill-{self.born}"
        self.prefill = PrefillEndpoint(
            self.source.geometry(), SimTransport(self.net, name), self.settings, clock=self.clock,
            links=SimLinks(self.net, name), is_threaded=False, instance=name,
        )  # fmt: skip

    def new_decode(self) -> None:
        self.born += 1
        self.target, self.loads = Pool(), []
        name = f"decode-{self.born}"
        self.decode = DecodeEndpoint(
            self.target.geometry(), SimTransport(self.net, name), self.settings, clock=self.clock,
            links=SimLinks(self.net, name), is_threaded=False, instance=name,
        )  # fmt: skip

    def meet(self) -> None:
        p, d = self.prefill.instance, self.decode.instance
        if (d, p) not in self.net.links:
            self.net.connect(d, p)
            self.net.push(d, p, FrameType.HELLO, pack_words(self.decode.identity.words()))

    # ------------------------------------------------------------------------------------------------ engine models

    def start_load(self) -> None:
        count = self.rng.randint(1, 4)
        if len(self.target.free) < count or not self.target.free_extra:
            return
        self.room += 1
        pages, item = self.target.take(count)
        request = LoadRequest(
            self.prefill.instance, self.room, np.array(pages), self.rng.uniform(0.5, 3.0), {"aux": np.array([item])}
        )
        self.loads.append(LoadJob(self.decode.start_load_kv(request), pages, item))

    def poll_loads(self) -> None:
        for job in list(self.loads):
            status = job.load.status()
            if job.drain is None and status.state is LoadState.COMPLETE and self.rng.random() < 0.5:
                self.check(job)
                job.load.publish()
                self.published += 1
                self.loads.remove(job)
                self.target.give(job.pages, job.item)
            elif job.drain is None and status.state in (LoadState.FAILED, LoadState.TIMED_OUT, LoadState.ABORTED):
                job.drain = job.load.release()
            elif job.drain is not None and job.drain.is_done():
                self.loads.remove(job)
                self.target.give(job.pages, job.item)

    def check(self, job: LoadJob) -> None:
        key = job.load.key
        for at, page in enumerate(job.pages):
            for layer in range(LAYERS):
                assert (self.target.layers[layer, page] == stamp(key.room, key.epoch, layer, at)).all(), (
                    key,
                    at,
                    layer,
                )
        assert (self.target.extra[job.item] == stamp(key.room, key.epoch, LAYERS, 0)).all()

    def start_send(self) -> None:
        known = {job.key for job in self.sends}
        offers = [r for rooms in list(self.prefill._sends.rooms) for r in self.prefill.reservations(rooms)]
        for offer in offers:
            count = len(offer.pages)
            if offer.key not in known and len(self.source.free) >= count and self.source.free_extra:
                pages, item = self.source.take(count)
                cuts = sorted({0, count, *self.rng.choices(range(count + 1), k=2)})
                self.sends.append(SendJob(offer.key, pages, item, cuts))

    def compute(self, job: SendJob) -> None:
        """One more layer of the forward under way, or the next forward."""
        if job.forward is None:
            if len(job.cuts) < 2 or self.prefill.status(job.key).state is not SendState.OPEN:
                return
            job.span = (job.cuts.pop(0), job.cuts[0])
            is_last = len(job.cuts) == 1
            chunk = Chunk(
                job.key, job.span[0], np.array(job.pages[slice(*job.span)]), is_last,
                {"aux": np.array([job.item])} if is_last else {},
            )  # fmt: skip
            job.forward = self.prefill.start_save_kv([chunk], layered=self.rng.random() < 0.8)
            job.layers = list(range(LAYERS))
            return
        if job.layers:
            layer = job.layers.pop(0)
            for at in range(*job.span):
                self.source.layers[layer, job.pages[at]] = stamp(job.key.room, job.key.epoch, layer, at)
            if self.rng.random() < 0.8:
                job.forward.save_kv_layer(layer)
            return
        self.source.extra[job.item] = stamp(job.key.room, job.key.epoch, LAYERS, 0)
        job.forward.finish()
        job.forward = None

    def poll_sends(self) -> None:
        for job in list(self.sends):
            status = self.prefill.status(job.key)
            if status.state is not SendState.OPEN and job.drain is None:
                job.drain = self.prefill.drain(job.key)
                self.prefill.forget(job.key)
            if job.drain is not None and job.drain.is_done():
                self.sends.remove(job)
                self.source.give(job.pages, job.item)

    # ------------------------------------------------------------------------------------------------------- running

    def step(self) -> None:
        net = self.net
        self.clock.advance(self.rng.uniform(0, 0.03))
        net.tick()
        if not net.node(self.prefill.instance).is_paused:
            self.prefill.step(0.0)
            self.start_send()
            for job in self.sends:
                if self.rng.random() < 0.5:
                    self.compute(job)
            self.poll_sends()
        if not net.node(self.decode.instance).is_paused:
            self.decode.step(0.0)
            self.poll_loads()

    def misbehave(self) -> None:
        roll = self.rng.random()
        p, d = self.prefill.instance, self.decode.instance
        if roll < 0.05 and self.loads:
            self.rng.choice(self.loads).load.abort("the client left")
        elif roll < 0.08 and self.sends:
            self.prefill.abort(self.rng.choice(self.sends).key, "the client left")
        elif roll < 0.09:
            self.net.cut(p, d)
        elif roll < 0.12:
            node = self.net.node(self.rng.choice([p, d]))
            node.is_paused = not node.is_paused
        elif roll < 0.125:
            self.net.kill(p)
            self.new_prefill()
        elif roll < 0.13:
            self.net.kill(d)
            self.new_decode()

    def rest(self) -> None:
        """No more requests: everything must end and come back by itself."""
        for name in (self.prefill.instance, self.decode.instance):
            self.net.node(name).is_paused = False
        if self.net.carries_notes or not self.net.fault_rate:
            for _ in range(1500):
                self.meet()
                self.step()
        else:  # what is lost stays in quarantine until its sender has ended
            self.net.kill(self.prefill.instance)
            for _ in range(800):
                self.net.tick()
                self.clock.advance(0.02)
                self.decode.step(0.0)
                self.poll_loads()
            self.sends.clear()
            self.source = Pool()
        assert not self.loads and not self.sends
        assert len(self.target.free) == len(self.source.free) == SLOTS
        assert self.decode.quarantined_pages == 0 and not self.decode.receiver.loads


def run(seed: int, carries_notes: bool) -> World:
    world = World(seed, carries_notes)
    for _ in range(600):
        world.meet()
        if world.rng.random() < 0.3:
            world.start_load()
        world.misbehave()
        world.step()
    world.rest()
    return world


@pytest.mark.parametrize("carries_notes", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_faults_keeps_the_promises(seed: int, carries_notes: bool) -> None:
    run(seed, carries_notes)


def settle_at_once(self: Receiver, load: Landing, now: float, passed: float) -> None:
    self._settle(load)


def never_in_flight(self: Send) -> bool:
    return self.state is not SendState.OPEN


def written_always(self: ChunkSend, start: int, stop: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Receiver, "_drain", settle_at_once),
        (Send, "is_settled", property(never_in_flight)),
        (Send, "is_quiet", property(never_in_flight)),
        (ChunkSend, "is_written", written_always),
    ],
    ids=["no quarantine", "source freed while read", "settled while writing", "sent before it is written"],
)
def test_the_simulation_finds_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: object
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        for seed in range(60):
            run(seed, carries_notes=True)


def test_without_faults_every_request_arrives() -> None:
    world = World(3, carries_notes=True)
    world.net.fault_rate = 0.0
    asked = 0
    for _ in range(600):
        world.meet()
        before = world.room
        if world.rng.random() < 0.1 and not world.loads:
            world.start_load()
        asked += world.room - before
        world.step()
    world.rest()
    failed = world.decode.metrics.snapshot().counters.get("pd_load_failed", 0)
    assert world.published == asked - failed > 10
