"""The load queue over pages that a test steps: order, fairness, failure, abort at any point, and never a late byte."""

import random
import threading
import time

import pytest

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.sglang_adapter.linker_loads import Batch, LoadQueue

LAYERS = 6
LIMIT_S = 20.0


class FakeCounter:
    """As SGLang's: complete twice, or after a failure, raises."""

    def __init__(self, layers=LAYERS):
        self.layers, self.lock, self.states, self.order = layers, threading.Lock(), {}, []
        self.landed = threading.Condition(self.lock)

    def start(self, index):
        self.states[index] = [None] * self.layers

    def complete(self, index, layer):
        with self.lock:
            assert self.states[index][layer] is None, "a layer was completed twice or after a failure"
            self.states[index][layer] = True
            self.order.append((index, layer))
            self.landed.notify_all()

    def fail(self, index, error):
        with self.lock:
            self.states[index] = [state or False for state in self.states.get(index, [])]
            self.landed.notify_all()

    def finish(self, index):
        with self.lock:
            assert self.landed.wait_for(lambda: None not in self.states[index], LIMIT_S), "SGLang would hang here"
            return all(self.states.pop(index))


class LateDrain:
    """I/O that outlived its call: moves its byte when the test lets it."""

    def __init__(self, source):
        self.source, self.done = source, threading.Event()

    def land(self):
        self.source.touch()
        self.done.set()

    def is_done(self):
        return self.done.is_set()

    def wait(self, timeout_s):
        return self.done.wait(timeout_s)


class Stepped:
    """Pages that record every write to their slots; ``gate`` stands before each layer."""

    def __init__(self, *, fail_at=None, late_at=None, missing=False, gate=None, on_layer=None):
        self.fail_at, self.late_at, self.missing, self.gate, self.on_layer = fail_at, late_at, missing, gate, on_layer
        self.is_free, self.late_writes, self.layers, self.closed = False, 0, [], 0
        self.drain, self.held, self.lock = LateDrain(self), [], threading.Lock()

    def touch(self):
        with self.lock:
            self.late_writes += self.is_free

    def free(self):
        """What SGLang does with the slots after ``finish``."""
        with self.lock:
            self.is_free = True

    def open(self, deadline):
        return not self.missing

    def layer(self, layer, deadline):
        if self.on_layer is not None:
            self.on_layer(layer)
        if self.gate is not None:
            assert self.gate.wait(LIMIT_S)
        self.touch()
        with self.lock:
            self.layers.append(layer)
        if layer == self.late_at:
            return False, self.drain
        return layer != self.fail_at, None

    def close(self):
        self.closed += 1
        return ()

    def quarantine(self, drain):
        self.held.append(drain)


STEPS = tuple(("kv", layer) for layer in range(LAYERS))


@pytest.fixture
def made():
    queues = []

    def make(threads=2, step_s=5.0, drain_s=5.0, layers=LAYERS):
        counter = FakeCounter(layers)
        queue = LoadQueue(counter, Metrics(), step_s=step_s, threads=threads, drain_s=drain_s)
        queues.append(queue)
        return counter, queue

    yield make
    for queue in queues:
        queue.close(1.0)


def submit(counter, queue, index, source, steps=STEPS):
    counter.start(index)
    batch = Batch(index, {"kv": source}, steps)
    queue.submit(batch)
    return batch


def test_layers_complete_in_order_and_before_the_load_has_ended(made):
    counter, queue = made(threads=1)
    gates = [threading.Event() for _ in range(LAYERS)]

    def hold(layer):
        assert gates[layer].wait(LIMIT_S)

    source = Stepped(on_layer=hold)
    submit(counter, queue, 0, source)
    for layer in range(LAYERS):
        assert len(counter.order) == layer
        gates[layer].set()
        with counter.lock:
            assert counter.landed.wait_for(lambda n=layer: len(counter.order) > n, LIMIT_S)
    assert queue.finish(0) is True
    assert counter.order == [(0, layer) for layer in range(LAYERS)]
    assert source.closed == 1


def test_batches_take_turns_layer_by_layer(made):
    counter, queue = made(threads=1)
    gate = threading.Event()
    for index in range(3):
        submit(counter, queue, index, Stepped(gate=gate))
    gate.set()
    assert [queue.finish(i) for i in range(3)] == [True] * 3
    places = {i: [n for n, (index, _) in enumerate(counter.order) if index == i] for i in range(3)}
    last_first = max(p[0] for p in places.values())
    assert all(last_first < p[-1] for p in places.values())
    assert max(p[-1] for p in places.values()) - min(p[-1] for p in places.values()) <= 3


def test_a_missing_page_fails_the_load_before_any_slot_is_written(made):
    counter, queue = made()
    source = Stepped(missing=True)
    submit(counter, queue, 0, source)
    assert queue.finish(0) is False
    assert source.layers == [] and source.closed == 1


def test_a_failed_layer_ends_the_load_and_no_later_layer_is_read_in_vain(made):
    counter, queue = made(threads=1)
    source = Stepped(fail_at=2)
    submit(counter, queue, 0, source)
    assert queue.finish(0) is False
    assert source.layers == [0, 1, 2]
    assert queue._metrics.snapshot().counters["linker_failed_loads"] == 1


def test_finish_waits_for_a_read_that_another_threads_failure_left_running(made):
    counter, queue = made(threads=2)
    gate, both = threading.Event(), threading.Barrier(2)
    finished = threading.Event()

    def meet(layer):
        if layer in (0, 1):
            both.wait(LIMIT_S)
        if layer == 1:
            assert gate.wait(LIMIT_S)

    source = Stepped(fail_at=0, on_layer=meet)
    submit(counter, queue, 0, source)

    def finish():
        assert queue.finish(0) is False
        source.free()
        finished.set()

    thread = threading.Thread(target=finish)
    thread.start()
    with counter.lock:
        assert counter.landed.wait_for(lambda: False in counter.states.get(0, [False]), LIMIT_S)
    assert not finished.is_set()
    gate.set()
    assert finished.wait(LIMIT_S)
    thread.join()
    assert source.late_writes == 0 and 1 in source.layers


def test_finish_waits_for_io_that_outlived_its_deadline(made):
    counter, queue = made()
    source = Stepped(late_at=1)
    submit(counter, queue, 0, source)
    timer = threading.Timer(0.05, source.drain.land)
    timer.start()
    assert queue.finish(0) is False
    source.free()
    timer.join()
    assert source.late_writes == 0 and source.drain.is_done() and source.held == []


def test_io_that_never_ends_does_not_hang_sglang_and_its_slots_are_withheld(made):
    counter, queue = made(drain_s=0.05)
    source = Stepped(late_at=1)
    submit(counter, queue, 0, source)
    assert queue.finish(0) is False
    assert source.held == [source.drain]


def test_a_reader_that_never_returns_is_given_up_and_its_slots_are_withheld(made, monkeypatch):
    monkeypatch.setattr("sglang_hicache_ext.sglang_adapter.linker_loads.SLACK_S", 0.0)
    counter, queue = made(step_s=0.05)
    gate = threading.Event()
    source = Stepped(gate=gate)
    submit(counter, queue, 0, source)
    assert queue.finish(0) is False
    assert len(source.held) == 1 and not source.held[0].is_done()
    gate.set()
    assert source.held[0].wait(LIMIT_S)


def test_a_layer_of_a_pool_that_this_load_does_not_touch_is_complete_at_once(made):
    counter, queue = made(layers=4)
    source = Stepped()
    counter.start(0)
    queue.submit(Batch(0, {"kv": source}, (("kv", 0), ("swa", 0), ("kv", 1), ("swa", 1))))
    assert queue.finish(0) is True
    assert sorted(source.layers) == [0, 1]


def one_life(seed):
    """A random mix of batches, failures, late I/O, resets and finishes; returns what must hold."""
    rng = random.Random(seed)
    counter = FakeCounter()
    queue = LoadQueue(counter, Metrics(), step_s=5.0, threads=rng.choice((1, 2, 3)), drain_s=5.0)
    sources, batches = [], []
    point, reached = rng.randrange(LAYERS), threading.Event()
    try:
        for index in range(rng.choice((1, 1, 2, 3))):
            kind = rng.random()
            source = Stepped(
                fail_at=rng.randrange(LAYERS) if kind < 0.3 else None,
                late_at=rng.randrange(LAYERS) if 0.3 <= kind < 0.5 else None,
                missing=kind > 0.95,
                on_layer=lambda layer: reached.set() if layer == point else None,
            )
            sources.append(source)
            batches.append(submit(counter, queue, index, source))
        landers = [threading.Timer(rng.random() * 0.002, s.drain.land) for s in sources if s.late_at is not None]
        for timer in landers:
            timer.start()
        if rng.random() < 0.5:  # a reset in the middle, at the layer of this seed
            reached.wait(0.02)
            assert queue.stop_all(LIMIT_S)
        results = [queue.finish(b.index) for b in batches]
        for source in sources:
            source.free()
        for timer in landers:
            timer.join()
        for result, source, batch in zip(results, sources, batches, strict=True):
            assert source.late_writes == 0
            assert source.closed == 1 and source.held == []
            assert result == (not batch.error and len(source.layers) == LAYERS)
            assert sorted(set(source.layers)) == sorted(source.layers)
        assert not queue._active and not queue._batches and counter.states == {}
    finally:
        queue.close(1.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_aborts_at_each_point_of_a_load_never_write_after_finish_in_500_seeds():
    started = time.monotonic()
    for seed in range(500):
        one_life(seed)
        assert time.monotonic() - started < 110, f"too slow at seed {seed}"
