"""Mooncake's TransferEngine: writes over rdma or tcp. It carries no notes, so the endpoint sends them when a write is done.

Its calls block, for 60 s where a peer hangs, and a failed one may still move bytes afterwards; so each peer has a few threads
of its own, and a failed write counts as LOST. Source: mooncake-transfer-engine 0.3.13, ``mooncake.engine``.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from sglang_hicache_ext.errors import CapabilityError, StoreError
from sglang_hicache_ext.pd.geometry import LayerBuffer
from sglang_hicache_ext.pd.transport import Rows, WriteState

THREADS = 4
"""Blocking writes to one peer at a time."""


class MooncakeWrite:
    """See ``transport.Write``. Set by a worker thread, read by the owner."""

    def __init__(self, addrs: list[int], remote: list[int], sizes: list[int]) -> None:
        self.addrs, self.remote, self.sizes = addrs, remote, sizes
        self.known = WriteState.PENDING

    def state(self) -> WriteState:
        return self.known

    def release(self) -> None:
        pass


class _Lane:
    """The threads of one peer. Daemons: one that hangs in Mooncake does not keep the process."""

    def __init__(self, engine: Any, session: str) -> None:
        self._engine, self._session = engine, session
        self._jobs: queue.SimpleQueue[MooncakeWrite | None] = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self._run, name="hicache-ext-pd-write", daemon=True).start()

    def post(self, write: MooncakeWrite) -> None:
        self._jobs.put(write)

    def stop(self) -> None:
        for _ in range(THREADS):
            self._jobs.put(None)

    def _run(self) -> None:
        while (write := self._jobs.get()) is not None:
            try:
                code = self._engine.batch_transfer_sync_write(self._session, write.addrs, write.remote, write.sizes)
            except Exception:
                code = -1
            write.known = WriteState.LOST if code else WriteState.DONE


class MooncakeTransport:
    """See ``transport.Transport``."""

    name = "mooncake"
    carries_notes = False

    def __init__(self, host: str, protocol: str = "tcp", devices: str = "") -> None:
        self._host, self._protocol, self._devices = host, protocol, devices
        self._peers: dict[str, tuple[_Lane, tuple[LayerBuffer, ...]]] = {}

    def register(self, buffers: Sequence[LayerBuffer]) -> None:
        if self._protocol == "tcp":
            os.environ.setdefault("MC_FORCE_TCP", "true")  # tcp alone may still bring up RDMA
        os.environ.setdefault("GLOG_minloglevel", "2")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as e:
            raise CapabilityError(
                f"Mooncake is not there: {e}", "pd_transport", "pip install mooncake-transfer-engine"
            ) from e
        self._engine = TransferEngine()
        code = self._engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._devices)
        if code:
            raise CapabilityError(
                f"Mooncake did not start on {self._host}: {code}", "pd_transport", "give an own address"
            )
        for b in buffers:
            code = self._engine.register_memory(b.addr, b.item_bytes * b.items)
            if code:
                raise CapabilityError(f"Mooncake cannot register {b.name}: {code}", "pd_transport", "see its log")
        self._buffers = tuple(buffers)
        self._session = f"{self._host}:{self._engine.get_rpc_port()}"

    def metadata(self) -> bytes:
        return self._session.encode()

    def connect(self, peer: str, metadata: bytes, buffers: Sequence[LayerBuffer]) -> None:
        self._peers[peer] = (_Lane(self._engine, metadata.decode()), tuple(buffers))

    def forget(self, peer: str) -> None:
        lane, _ = self._peers.pop(peer, (None, ()))
        if lane is not None:
            lane.stop()

    def post(self, peer: str, rows: Rows, note: bytes) -> MooncakeWrite:
        found = self._peers.get(peer)
        if found is None:
            raise StoreError("write", "not connected", path=peer)
        lane, there = found
        addrs, remote, sizes = list[int](), list[int](), list[int]()
        for at, local_items, remote_items in rows:
            one, size = self._buffers[at], self._buffers[at].item_bytes
            for start, stop in runs(local_items, remote_items):
                addrs.append(one.addr + int(local_items[start]) * size)
                remote.append(there[at].addr + int(remote_items[start]) * size)
                sizes.append((stop - start) * size)
        write = MooncakeWrite(addrs, remote, sizes)
        if not sizes:
            write.known = WriteState.DONE
        else:
            lane.post(write)
        return write

    def poll_notes(self) -> list[bytes]:
        return []

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)


def runs(local: np.ndarray[Any, Any], remote: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Cut two index arrays into [start, stop) positions that are contiguous on both sides."""
    if not len(local):
        return []
    breaks = np.flatnonzero((np.diff(local) != 1) | (np.diff(remote) != 1)) + 1
    bounds = [0, *breaks.tolist(), len(local)]
    return list(pairwise(bounds))
