"""Who is at the other end, and do the two fit? Both sides check, and both name every differing fact with both values."""

from __future__ import annotations

import base64
import socket
import time
from dataclasses import dataclass
from typing import Any

from sglang_hicache_ext import __version__
from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer, PeerMismatchError, differences
from sglang_hicache_ext.pd.links import split_address
from sglang_hicache_ext.pd.wire import PROTOCOL, FrameReader, FrameType, WireError, frame, pack_words, unpack_words

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Identity:
    """What one side says about itself."""

    role: str
    instance: str
    address: str
    transport: str
    geometry: Geometry
    metadata: bytes

    def words(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "role": self.role,
            "instance": self.instance,
            "address": self.address,
            "transport": self.transport,
            "geometry": self.geometry.words(),
            "places": [[b.addr, b.device] for b in self.geometry.buffers],
            "metadata": base64.b64encode(self.metadata).decode(),
        }


@dataclass(frozen=True)
class Peer:
    """The other side, checked."""

    name: str
    address: str
    buffers: tuple[LayerBuffer, ...]
    metadata: bytes


def check_peer(mine: dict[str, Any], theirs: dict[str, Any]) -> Peer:
    """Raises PeerMismatchError with every difference; WireError when ``theirs`` is not an identity at all."""
    try:
        lines = [
            f"{name}: here {mine[name]!r}, peer {theirs[name]!r}"
            for name in ("protocol", "version", "transport")
            if mine[name] != theirs[name]
        ]
        if {mine["role"], theirs["role"]} != {PREFILL, DECODE}:
            lines.append(f"role: here {mine['role']!r}, peer {theirs['role']!r}")
        lines += differences(mine["geometry"], theirs["geometry"])
        if lines:
            raise mismatch(lines)
        buffers = tuple(
            LayerBuffer(str(name), int(layer), int(addr), int(item), int(items), str(space), int(device))
            for (name, layer, item, items, space), (addr, device) in zip(
                theirs["geometry"]["buffers"], theirs["places"], strict=True
            )
        )
        metadata = base64.b64decode(theirs["metadata"])
        return Peer(str(theirs["instance"]), str(theirs["address"]), buffers, metadata)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise WireError("an identity that cannot be read") from e


def mismatch(lines: list[str]) -> PeerMismatchError:
    return PeerMismatchError(
        "the two sides do not fit: " + "; ".join(lines),
        "PD handshake",
        "start both with the same model, options and versions",
    )


def dial(address: str, mine: dict[str, Any], timeout_s: float) -> tuple[Peer, socket.socket]:
    """Connect, exchange identities, and wait until the peer has warmed the path. Blocks its caller's thread.

    Raises:
        PeerMismatchError: naming every difference with both values, from this side's view.
        StoreError: nobody answers, or not in time.
    """
    where = split_address(address)
    deadline = time.monotonic() + timeout_s
    try:
        sock = socket.create_connection(where, timeout=timeout_s)
    except OSError as e:
        raise StoreError(
            "connect", f"no prefill endpoint answers: {e}", path=address, errno=e.errno or 0, is_transient=True
        ) from e
    try:
        return _greet(sock, address, mine, deadline), sock
    except BaseException:
        sock.close()
        raise


def _greet(sock: socket.socket, address: str, mine: dict[str, Any], deadline: float) -> Peer:
    peer: Peer | None = None
    try:
        sock.sendall(frame(FrameType.HELLO, pack_words(mine)))
        reader = FrameReader()
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            data = sock.recv(1 << 20)
            if not data:
                break
            for kind, body in reader.feed(data):
                if kind is FrameType.HELLO:
                    peer = _checked(sock, mine, body)
                elif kind is FrameType.REFUSED:
                    raise _refusal(mine, unpack_words(body))
                elif kind is FrameType.READY and peer is not None:
                    return peer
    except TimeoutError:
        pass
    except (OSError, WireError) as e:
        raise StoreError("connect", f"no PD endpoint of this protocol: {e}", path=address) from e
    said = "it did not get ready in time" if peer is not None else "it did not answer as a PD endpoint in time"
    raise StoreError("connect", said, path=address, is_transient=True)


def _checked(sock: socket.socket, mine: dict[str, Any], body: bytes) -> Peer:
    theirs = unpack_words(body)
    try:
        return check_peer(mine, theirs)
    except PeerMismatchError:
        sock.sendall(frame(FrameType.REFUSED, pack_words(mine)))
        raise


def _refusal(mine: dict[str, Any], theirs: dict[str, Any]) -> Exception:
    """The peer has refused and says who it is: name the differences from this side's view."""
    try:
        check_peer(mine, theirs)
    except PeerMismatchError as e:
        return e
    return mismatch([str(theirs.get("reason", "the peer gave no reason"))])
