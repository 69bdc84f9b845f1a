"""Control links: what the two sides tell each other beside the pages. Plain TCP, one link per pair.

The link also tells when a peer dies: its kernel closes it. A closed link alone proves nothing about the process (a firewall
closes links too), so ``prove_end`` asks at the peer's address whether that instance still lives.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.pd.wire import FrameReader, FrameType, WireError, frame

OUTBOX_BYTES = 64 << 20
"""A peer that takes nothing in is cut off once so much waits for it."""
USER_TIMEOUT_MS = 20_000
PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class Frame:
    peer: str
    kind: FrameType
    body: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """The link is down; the process behind it may live."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The process behind ``peer`` has ended: proven."""

    peer: str


Event = Frame | Lost | Gone


class Links(Protocol):
    """Owner thread only, except ``wake``."""

    @property
    def address(self) -> str: ...

    def send(self, peer: str, kind: FrameType, body: bytes = b"") -> bool:
        """Queue a frame; False when there is no link to ``peer``."""
        ...

    def rename(self, old: str, new: str) -> None:
        """An unnamed caller has said who it is. An older link of that name is closed without an event."""
        ...

    def drop(self, peer: str) -> None:
        """Send what is queued and close; no event follows."""
        ...

    def is_up(self, peer: str) -> bool: ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits at most ``timeout_s`` for the first one or for ``wake``."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Link:
    peer: str
    sock: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outbox: bytearray = field(default_factory=bytearray)
    is_closing: bool = False


class TcpLinks:
    """Links over TCP with a listener on ``host``. Names of callers that have not said who they are start with "?"."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._selector = selectors.DefaultSelector()
        self._links: dict[str, _Link] = {}
        self._unnamed = 0
        self._events: list[Event] = []
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"host is {host!r}", "PD control link", "give the address that the peers reach")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {e}", "PD control link", "give an address of this machine"
            ) from e
        self._listener.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def is_up(self, peer: str) -> bool:
        return peer in self._links

    def adopt(self, peer: str, sock: socket.socket) -> None:
        """Take over a connected socket whose peer is known."""
        self._unlink(peer)
        _tune(sock)
        link = self._links[peer] = _Link(peer, sock)
        self._selector.register(sock, selectors.EVENT_READ, link)

    def rename(self, old: str, new: str) -> None:
        self._unlink(new)
        link = self._links.pop(old, None)
        if link is not None:
            link.peer = new
            self._links[new] = link

    def send(self, peer: str, kind: FrameType, body: bytes = b"") -> bool:
        link = self._links.get(peer)
        if link is None or link.is_closing:
            return False
        link.outbox += frame(kind, body)
        if len(link.outbox) > OUTBOX_BYTES:
            self._lose(link, "the peer takes nothing in")
            return False
        self._flush(link)
        return peer in self._links

    def drop(self, peer: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.is_closing = True
            self._flush(link)

    def poll(self, timeout_s: float) -> list[Event]:
        for key, mask in self._selector.select(0 if self._events else timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            else:
                self._serve(key.data, mask)
        events, self._events = self._events, []
        return events

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        self._unnamed += 1
        self.adopt(f"?{self._unnamed}", sock)

    def _serve(self, link: _Link, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(link)
        if not mask & selectors.EVENT_READ or self._links.get(link.peer) is not link:
            return
        try:
            data = link.sock.recv(1 << 20)
            if not data:
                self._lose(link, "the link was closed")
                return
            self._events += [Frame(link.peer, kind, body) for kind, body in link.reader.feed(data)]
        except BlockingIOError:
            return
        except (OSError, WireError) as e:
            self._lose(link, str(e))

    def _flush(self, link: _Link) -> None:
        try:
            while link.outbox:
                sent = link.sock.send(link.outbox)
                del link.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError as e:
            self._lose(link, str(e))
            return
        if link.is_closing and not link.outbox:
            self._unlink(link.peer)
            return
        want = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0)
        if self._selector.get_key(link.sock).events != want:
            self._selector.modify(link.sock, want, link)

    def _lose(self, link: _Link, reason: str) -> None:
        if self._links.get(link.peer) is link:
            self._unlink(link.peer)
            if not link.is_closing:
                self._events.append(Lost(link.peer, reason))

    def _unlink(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._selector.unregister(link.sock)
            link.sock.close()

    def close(self) -> None:
        for peer in list(self._links):
            self._unlink(peer)
        with self._wake_lock:
            if self._wake_fd < 0:
                return
            self._selector.close()
            self._listener.close()
            os.close(self._wake_fd)
            self._wake_fd = -1


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def split_address(address: str) -> tuple[str, int]:
    """host and port of "host:port" or "[host]:port". Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no address", "PD peer", 'write "host:port"')
    return host.strip("[]"), int(port)


def instance_at(address: str, timeout_s: float) -> str | None:
    """The instance that listens at ``address``: its name, "" when it is proven that none does, None when unknown."""
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection(split_address(address), timeout=timeout_s) as sock:
            sock.sendall(frame(FrameType.WHO))
            reader = FrameReader()
            while (left := deadline - time.monotonic()) > 0:
                sock.settimeout(left)
                data = sock.recv(1 << 16)
                if not data:
                    return None
                for kind, body in reader.feed(data):
                    if kind is FrameType.ME:
                        return body.decode(errors="replace")
    except ConnectionRefusedError:
        return ""
    except (OSError, WireError):
        return None
    return None


def prove_end(address: str, instance: str, is_wanted: Callable[[], bool], pause_s: float = PROBE_S) -> bool | None:
    """Ask at ``address`` until it is known whether ``instance`` lives there: True ended, False alive, None no longer wanted.

    Blocks its caller's thread. A machine that does not answer proves nothing.
    """
    while is_wanted():
        found = instance_at(address, pause_s)
        if found is not None:
            return found != instance
        time.sleep(pause_s)
    return None
