"""One life of the worker process: start, greet, kill.

``kill`` returns True only when the process is gone: its threads have ended, its sockets are closed and its RDMA resources
destroyed, so that no byte can still be written on its behalf.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_hicache_ext.storage_backends.remote.lanes import Channel, Lane, LanePool
from sglang_hicache_ext.storage_backends.remote.ring import Ring
from sglang_hicache_ext.storage_backends.remote.worker import MAX_MESSAGE, load_engine, serve_channel

CONTROL_CHANNELS = 2
MOONCAKE = "sglang_hicache_ext.storage_backends.remote.mooncake:MooncakeEngine"
_BOOT = (
    "import sys, json; spec = json.loads(sys.argv[1]); sys.path[:] = spec['sys_path']; "
    "from sglang_hicache_ext.storage_backends.remote.worker import main; main(spec)"
)


class StartError(Exception):
    """The worker could not be brought up; the text is its own reason."""


@dataclass(frozen=True)
class WorkerSpec:
    """How to start a worker.

    Attributes:
        engine: "module:class" of the ObjectEngine.
        settings: JSON-ready settings of the engine.
        ring_bytes, lanes: the staging ring and the data lanes that share it.
        sys_path: further import folders of the worker (a test's engine).
        log: file for the worker's output, "" drops it.
    """

    engine: str
    settings: dict[str, Any]
    ring_bytes: int
    lanes: int
    sys_path: tuple[str, ...] = ()
    log: str = ""
    start_timeout_s: float = 15.0


class WorkerLife(Protocol):
    """A started worker. ``pool`` gives out its lanes."""

    pool: LanePool
    ring: Ring
    info: dict[str, Any]

    def kill(self, timeout_s: float) -> bool:
        """End it for good; True when provably nothing of it moves a byte any more."""
        ...

    def is_alive(self) -> bool: ...

    @property
    def has_ended(self) -> bool:
        """True once ``kill`` was asked for and is complete. Never blocks."""
        ...


def _channels(spec: WorkerSpec) -> list[tuple[socket.socket, socket.socket]]:
    """(ours, theirs) of two channels a lane and the control channels, in this order."""
    count = 2 * spec.lanes + CONTROL_CHANNELS
    return [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]


def _lanes(ring: Ring, sockets: list[socket.socket], lanes: int) -> LanePool:
    data = [
        Lane(ring, tuple(Channel(sockets[2 * i + j], half) for j, half in enumerate(ring.halves(i))))
        for i in range(lanes)
    ]
    return LanePool(data, [Channel(s) for s in sockets[2 * lanes :]])


class ProcessWorker:
    """The worker in a process of its own; the design that ships."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.ring = Ring(spec.ring_bytes, spec.lanes)
        pairs = _channels(spec)
        self._sockets = [ours for ours, _ in pairs]
        theirs = [other for _, other in pairs]
        life_read, self._life = os.pipe()
        try:
            self._process = _spawn(spec, self.ring, theirs, life_read)
        finally:
            os.close(life_read)
            for sock in theirs:
                sock.close()
            self.ring.close_fd()
        self.pool = _lanes(self.ring, self._sockets, spec.lanes)
        try:
            self.info = _greeting(self._sockets[0], spec.start_timeout_s)
        except BaseException:
            self.kill(5.0)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def has_ended(self) -> bool:
        return not self.is_alive()

    def kill(self, timeout_s: float) -> bool:
        self._process.send_signal(signal.SIGKILL)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False  # stuck in the kernel; its ring stays its own, see Ring
        self.pool.dispose()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        return True


def _spawn(spec: WorkerSpec, ring: Ring, channels: list[socket.socket], life: int) -> subprocess.Popen[bytes]:
    fds = [s.fileno() for s in channels]
    text = json.dumps(
        {
            "engine": spec.engine, "settings": spec.settings, "sys_path": [*spec.sys_path, *sys.path],
            "ring_fd": ring.fd, "ring_bytes": ring.nbytes, "channel_fds": fds, "life_fd": life, "parent": os.getpid(),
        }
    )  # fmt: skip
    with open(spec.log or os.devnull, "ab") as log:
        # -I: no PYTHONPATH, no user folder, no sitecustomize of the serving process
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, text],
            pass_fds=[ring.fd, life, *fds], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _greeting(sock: socket.socket, timeout_s: float) -> dict[str, Any]:
    if not select.select([sock], [], [], timeout_s)[0]:
        raise StartError(f"no answer within {timeout_s:g} s")
    raw = sock.recv(MAX_MESSAGE)
    if not raw:
        raise StartError("the worker process ended while it started")
    greeting = json.loads(raw)
    if not greeting["ready"]:
        raise StartError(greeting["error"])
    info: dict[str, Any] = greeting["info"]
    return info


@dataclass
class ThreadWorker:
    """The worker as threads of this process: for zero-copy, and to measure what the process costs.

    It cannot be killed. ``kill`` closes the client and waits for its threads; while one is stuck the answer is False
    and its memory must stay out of use.
    """

    spec: WorkerSpec
    info: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _reaper: threading.Thread | None = None

    def __post_init__(self) -> None:
        spec = self.spec
        self.ring = Ring(spec.ring_bytes, spec.lanes)
        self.ring.close_fd()
        self.engine = load_engine(spec.engine, spec.settings)
        try:
            self.info = self.engine.open(self.ring.base, self.ring.nbytes)
        except (OSError, RuntimeError) as error:
            raise StartError(str(error)) from error
        pairs = _channels(spec)
        sockets = [ours for ours, _ in pairs]
        turns = [threading.Lock() for _ in pairs]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(theirs, turns[i // 2]), daemon=True, name=f"hicache-ext-channel-{i}"
            )
            for i, (_, theirs) in enumerate(pairs)
        ]
        for thread in self._threads:
            thread.start()
        self.pool = _lanes(self.ring, sockets, spec.lanes)

    def _serve(self, sock: socket.socket, turns: threading.Lock) -> None:
        with sock:
            serve_channel(sock, self.engine, self.ring.base, turns)

    def is_alive(self) -> bool:
        return all(t.is_alive() for t in self._threads)

    def kill(self, timeout_s: float) -> bool:
        with self._lock:
            if self._reaper is None:
                self.pool.dispose()
                self._reaper = threading.Thread(target=self._reap, daemon=True, name="hicache-ext-reaper")
                self._reaper.start()
        return self._ended.wait(timeout_s)

    def _reap(self) -> None:
        for thread in self._threads:
            thread.join()
        self.engine.close()
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def register(self, addr: int, nbytes: int) -> int:
        """Let the client write into further memory of this process; a negative code when it cannot."""
        return int(self.engine.register(addr, nbytes))
