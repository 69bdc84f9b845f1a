"""What both ends have in common: a thread that owns the transport and the links, an inbox for other threads, waiting.

The thread sleeps on the links when nothing is under way. While groups are, it looks at the driver, which cannot wake it,
every 0.1 ms at first and every millisecond when nothing happens.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.pd.geometry import Geometry
from sglang_hicache_ext.pd.groups import GroupPlanner
from sglang_hicache_ext.pd.handshake import Identity
from sglang_hicache_ext.pd.links import Frame, Gone, Links, Lost, TcpLinks, prove_end
from sglang_hicache_ext.pd.settings import PdSettings
from sglang_hicache_ext.pd.transport import Transport
from sglang_hicache_ext.pd.wire import FrameType, WireError
from sglang_hicache_ext.ports import Clock, SystemClock

log = logging.getLogger(__name__)

EAGER_ROUNDS = 20
EAGER_PAUSE_S = 0.0001
BUSY_WAIT_S = 0.001
IDLE_WAIT_S = 0.25
ERROR_PAUSE_S = 0.1


class Endpoint(ABC):
    """Base of both ends. ``is_threaded=False`` is for simulations, which call ``step`` themselves.

    Args:
        geometry: buffers and facts of this side; their memory stays alive until ``close``.
        transport: owned by the endpoint from now on.
        host: own address to listen on, as the peers reach it.
        links: in place of TCP, for simulations.
    """

    role = ""

    def __init__(
        self, geometry: Geometry, transport: Transport, settings: PdSettings, *, host: str = "127.0.0.1", port: int = 0,
        metrics: Metrics | None = None, clock: Clock | None = None, links: Links | None = None,
        is_threaded: bool = True, instance: str = "",
    ) -> None:  # fmt: skip
        self.geometry, self.settings = geometry, settings
        self.metrics = metrics or Metrics()
        self.planner = GroupPlanner(geometry, settings)
        self._clock: Clock = clock or SystemClock()
        self._transport = transport
        transport.register(geometry.buffers)
        self.instance = instance or f"{self.role}-{uuid.uuid4().hex}"
        self._links: Links = links or TcpLinks(host, port)
        self.identity = Identity(
            self.role, self.instance, self._links.address, transport.name, geometry, transport.metadata()
        )
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._progress = 0
        self._thread: threading.Thread | None = None
        self._prepare()
        if is_threaded:
            self._thread = threading.Thread(target=self._run, name=f"hicache-ext-pd-{self.role}", daemon=True)
            self._thread.start()

    @property
    def address(self) -> str:
        """host:port of the control link."""
        return self._links.address

    # ------------------------------------------------------------------------------------------- for other threads

    def _call(self, what: Callable[[], None]) -> None:
        """Have the owner thread do ``what``, in the order of the calls of one thread."""
        self._inbox.append(what)
        self._links.wake()

    def _notify(self) -> None:
        self._progress += 1
        with self._changed:
            self._changed.notify_all()

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Block until ``is_over``, at most ``timeout_s``; what it is at the end."""
        with self._changed:
            return self._changed.wait_for(lambda: is_over() or self._is_closed, timeout_s) and is_over()

    # ------------------------------------------------------------------------------------------------- owner thread

    def _run(self) -> None:
        quiet, wait_s = 0, IDLE_WAIT_S
        while not self._is_closed:
            seen = self._progress
            try:
                is_busy = self.step(wait_s)
            except Exception:
                self._on_error()
                is_busy = True
            quiet = 0 if seen != self._progress else quiet + 1
            if not is_busy:
                wait_s = IDLE_WAIT_S
            elif quiet < EAGER_ROUNDS:
                time.sleep(EAGER_PAUSE_S)
                wait_s = 0.0
            else:
                wait_s = BUSY_WAIT_S

    def _on_error(self) -> None:
        """A bug of ours or of a driver: end what is open, keep what may still be written to, and go on."""
        log.exception("PD endpoint %s: a round failed; its transfers are given up", self.instance)
        self.metrics.add("pd_errors")
        try:
            self._give_up("an error inside the PD endpoint")
        except Exception:
            log.exception("PD endpoint %s: its transfers could not be given up", self.instance)
        time.sleep(ERROR_PAUSE_S)

    def step(self, timeout_s: float) -> bool:
        """One round; True while something is under way that the links would not wake for."""
        while self._inbox:
            self._progress += 1
            self._inbox.popleft()()
        for event in self._links.poll(timeout_s):
            self._progress += 1
            try:
                self._on_event(event)
            except WireError as e:
                log.warning("PD peer %s: %s", event.peer, e)
                self._links.drop(event.peer)
                self._on_event(Lost(event.peer, str(e)))
        while self._inbox:
            self._inbox.popleft()()
        return self._advance(self._clock.now())

    def _on_event(self, event: Frame | Lost | Gone) -> None:
        if isinstance(event, Lost):
            if not event.peer.startswith("?"):
                log.info("PD link to %s is down: %s", event.peer, event.reason)
                self.metrics.add("pd_links_lost")
                self._on_lost(event.peer, event.reason)
        elif isinstance(event, Gone):
            self._on_gone(event.peer)
        elif event.kind is FrameType.WHO:
            self._links.send(event.peer, FrameType.ME, self.instance.encode())
            self._links.drop(event.peer)
        else:
            self._on_frame(event)

    def _prove_end(self, peer: str, address: str) -> None:
        """Find out, on a thread of its own, whether ``peer`` still lives, and say so in the inbox."""
        if self._thread is None:
            return  # a simulation brings the proof itself

        def prove() -> None:
            ended = prove_end(address, peer, lambda: not self._is_closed and not self._links.is_up(peer))
            if ended:
                self._call(lambda: self._on_gone(peer))
            elif ended is False:
                self._on_alive(peer, address)

        threading.Thread(target=prove, name="hicache-ext-pd-proof", daemon=True).start()

    # ---------------------------------------------------------------------------------------------- for the two ends

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the thread needs, before it starts."""

    @abstractmethod
    def _on_frame(self, event: Frame) -> None: ...

    @abstractmethod
    def _on_lost(self, peer: str, reason: str) -> None: ...

    @abstractmethod
    def _on_gone(self, peer: str) -> None: ...

    def _on_alive(self, peer: str, address: str) -> None:  # noqa: B027 (one end has nothing to do then)
        """The link broke but the process lives. On the proof's thread."""

    @abstractmethod
    def _advance(self, now: float) -> bool: ...

    @abstractmethod
    def _give_up(self, reason: str) -> None: ...

    def describe(self) -> dict[str, Any]:
        """Settings and counters, JSON-ready."""
        return {
            "role": self.role,
            "address": self.address,
            "transport": self._transport.name,
            "group_bytes": self.settings.group,
            "layered_min_bytes": self.settings.layered_min,
            "counters": dict(self.metrics.snapshot().counters),
        }

    def _stop(self) -> None:
        """End the thread, then the transport, and the links last: their end tells the peers that no byte will follow."""
        self._is_closed = True
        self._links.wake()
        self._notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10.0)
        self._transport.close()
        self._links.close()
