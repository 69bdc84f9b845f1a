"""The kvikio path, case by case: python kvikio_child.py DIRECTORY. Run with the stand-in driver."""

import gc
import sys
import threading
import time
import weakref

import numpy as np
from linker_kit import GEOMETRY, MHATokenToKVPool, flip, slots_of
from test_linker_pools import Stored

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.sglang_adapter.linker_gds import GdsPath
from sglang_hicache_ext.storage_backends.engines.base import PENDING, IoPlan
from sglang_hicache_ext.storage_backends.engines.kvikio_device import KvikioDeviceEngine
from sglang_hicache_ext.storage_backends.engines.kvikio_engine import KvikioEngine

PAGES = (5, 6, 20, 8)


class HostEngine(KvikioDeviceEngine):
    """Host addresses in place of device ones: the stand-in driver knows no device memory."""

    def piece(self, addr, size):
        return KvikioEngine.piece(self, addr, size)


def gds(stored):
    def open_engine(directory, depth):
        return HostEngine(directory, depth=depth)

    return GdsPath(stored.store, [stored.pool], depth=16, open_engine=open_engine, allow_compat=True)


def loads(directory):
    stored = Stored(directory, MHATokenToKVPool, sums=True)
    path = gds(stored)
    assert all(r.is_loaded and r.drain is None for r in stored.load(path, PAGES))
    stored.assert_same(PAGES)
    assert path.describe()["engine"]["path"] == "compat"  # said, not hidden
    path.close()


def corrupt(directory):
    stored = Stored(directory, MHATokenToKVPool, sums=True)
    needle = stored.memory[1, GEOMETRY.header_bytes + stored.pool.geometry.layer_bytes(0) :][:64].numpy().tobytes()
    assert flip(directory, needle, at=9)
    results = stored.load(gds(stored), PAGES)
    assert [r.is_loaded for r in results] == [True, False, True]
    assert not stored.store.contains(stored.ns, stored.keys)[1]


def no_sums(directory):
    """Pages written without sums cannot prove themselves on the device: a miss, never data."""
    stored = Stored(directory, MHATokenToKVPool, sums=False)
    assert not any(r.is_loaded for r in stored.load(gds(stored), PAGES))


def lifetime(directory):
    """Memory of a batch stays referenced until the last future ended, also when the caller lets go."""
    stored = Stored(directory, MHATokenToKVPool, sums=True)
    path = gds(stored)
    engine, gate, entered = path.lanes.all[0].engine, threading.Event(), threading.Event()
    original = engine._result

    def slow(*args):
        entered.set()
        assert gate.wait(60)
        return original(*args)

    engine._result = slow

    class Memory(np.ndarray):
        pass

    memory = np.zeros(8192, np.uint8).view(Memory)
    alive = weakref.ref(memory)
    handle = engine.open_file(str(stored.store.layout.segment_path(0)), writable=False)
    iov = np.asarray([[memory.ctypes.data, 4096]], np.uint64)
    files, offsets = np.asarray([handle], np.int32), np.zeros(1, np.int64)
    plan = IoPlan(files, offsets, np.asarray([0, 1], np.int32), iov, memory)
    result = engine.read(plan, 0.2)
    assert entered.is_set() and result.res[0] == PENDING
    drain = result.drain
    del memory, plan, result
    gc.collect()
    assert alive() is not None, "memory was released under a running read"
    gate.set()
    assert drain.wait(60)


def hang(directory):
    """A read that never ends: the call returns at its deadline with the drain, later calls still work."""
    stored = Stored(directory, MHATokenToKVPool, sums=True)
    path = gds(stored)
    engine, gate = path.lanes.all[0].engine, threading.Event()
    original = engine._result
    engine._result = lambda *args: (gate.wait(60), original(*args))[1]
    rows = stored.pool.rows(slots_of(PAGES), len(PAGES))
    read = stored.layered.open(stored.ns, stored.keys, time.monotonic() + 20, path.lanes)
    started = time.monotonic()
    result = path.read_layer(read, stored.pool, 0, rows, started + 0.3)
    assert time.monotonic() - started < 20
    assert not result.is_loaded and result.draining and not result.drain.is_done()
    gate.set()
    assert result.drain.wait(60)
    engine._result = original
    assert all(r.is_loaded for r in stored.load(path, PAGES))


def refused(directory):
    """Without GDS the path is refused at start, with what cuFile or kvikio said."""
    stored = Stored(directory, MHATokenToKVPool, sums=True)
    try:
        GdsPath(stored.store, [stored.pool], depth=4, open_engine=lambda d, n: HostEngine(d, depth=n))
    except CapabilityError as error:
        assert "no GPUDirect Storage" in str(error)
        return
    raise AssertionError("GDS without a driver was taken for real")


if __name__ == "__main__":
    for case in (loads, corrupt, no_sums, lifetime, hang, refused):
        case(f"{sys.argv[1]}-{case.__name__}")
        print("ok", case.__name__, flush=True)
