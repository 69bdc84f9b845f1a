"""A seeded network for the PD hooks: memory moves late and in pieces, notes overtake, links break, processes stop and die.

It allows whatever the ports allow: the source of a write is read when a piece moves, not when it is posted; pieces of a dead
sender may land for a while; a stopped process's writes may go on (as with RDMA) or wait (as with tcp).
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.pd.geometry import LayerBuffer
from sglang_hicache_ext.pd.links import Event, Frame, Gone, Lost
from sglang_hicache_ext.pd.transport import Rows, WriteState
from sglang_hicache_ext.pd.wire import FrameType
from sglang_hicache_ext.testing.clock import ManualClock

AFTERLIFE_S = 0.5
"""How long pieces of a dead process may still land; a receiver's ``drain_s`` has to be longer."""


@dataclass(eq=False)
class SimWrite:
    """See ``transport.Write``."""

    sender: str
    peer: str
    pieces: deque[tuple[int, int, int]]
    note: bytes
    ends: WriteState
    known: WriteState = WriteState.PENDING
    stops_at: float = float("inf")

    def state(self) -> WriteState:
        return self.known

    def release(self) -> None:
        pass


@dataclass
class _Node:
    is_alive: bool = True
    is_paused: bool = False
    notes: list[bytes] = field(default_factory=list)
    signals: list[tuple[float, Event]] = field(default_factory=list)


class SimNet:
    """All nodes, by instance name.

    Args:
        carries_notes: as the transports of this net say.
        fault_rate: share of writes that fail by themselves.
    """

    def __init__(self, seed: int, clock: ManualClock, *, carries_notes: bool = True, fault_rate: float = 0.0) -> None:
        self.rng, self.clock = random.Random(seed), clock
        self.carries_notes, self.fault_rate = carries_notes, fault_rate
        self.nodes: dict[str, _Node] = {}
        self.links: set[tuple[str, str]] = set()
        self.writes: list[SimWrite] = []
        self._pipes: dict[tuple[str, str], deque[tuple[float, Frame]]] = {}

    def node(self, name: str) -> _Node:
        return self.nodes.setdefault(name, _Node())

    def connect(self, a: str, b: str) -> None:
        self.links |= {(a, b), (b, a)}

    def cut(self, a: str, b: str) -> None:
        """The link breaks, both processes live."""
        for here, there in ((a, b), (b, a)):
            if (here, there) in self.links:
                self.links.discard((here, there))
                self._pipes.pop((there, here), None)
                self.node(here).signals.append((self.clock.now(), Lost(there, "cut")))

    def kill(self, name: str) -> None:
        """The process ends: its links close after what it had sent, and some time later the end is proven."""
        self.node(name).is_alive = False
        now = self.clock.now()
        for write in self.writes:
            if name in (write.sender, write.peer):
                write.stops_at = now + self.rng.uniform(0, AFTERLIFE_S) if write.sender == name else now
        for here, there in list(self.links):
            if there == name:
                self.links -= {(here, there), (there, here)}
                pipe = self._pipes.get((name, here))
                lost = max(now, pipe[-1][0]) if pipe else now
                proven = lost + self.rng.uniform(0, 1.0)
                self.node(here).signals += [(lost, Lost(name, "killed")), (proven, Gone(name))]

    def push(self, sender: str, peer: str, kind: FrameType, body: bytes) -> None:
        pipe = self._pipes.setdefault((sender, peer), deque())
        earliest = pipe[-1][0] if pipe else 0.0
        pipe.append((max(earliest, self.clock.now() + self.rng.uniform(0, 0.05)), Frame(sender, kind, body)))

    def due(self, name: str) -> list[Event]:
        """What has reached ``name`` by now."""
        now, found = self.clock.now(), list[tuple[float, int, Event]]()
        for (_, peer), pipe in self._pipes.items():
            while peer == name and pipe and pipe[0][0] <= now:
                at, frame = pipe.popleft()
                found.append((at, 0, frame))
        node = self.node(name)
        found += [(at, 1, event) for at, event in node.signals if at <= now]
        node.signals = [(at, event) for at, event in node.signals if at > now]
        return [event for _, _, event in sorted(found, key=lambda f: f[:2])]

    def tick(self) -> None:
        """Move some pieces of some writes, in no order."""
        now = self.clock.now()
        for write in self.rng.sample(self.writes, len(self.writes)):
            sender, peer = self.node(write.sender), self.node(write.peer)
            if now >= write.stops_at:
                write.pieces.clear()
                write.known = WriteState.FAILED
                continue
            if (sender.is_paused or peer.is_paused) and self.rng.random() < 0.7:
                continue
            for _ in range(self.rng.randint(0, len(write.pieces))):
                source, target, nbytes = write.pieces.popleft()
                ctypes.memmove(target, source, nbytes)
            if not write.pieces and write.ends is WriteState.DONE and self.rng.random() < 0.5:
                write.known = WriteState.DONE
                if self.carries_notes:
                    peer.notes.append(write.note)
                self.rng.shuffle(peer.notes)
            elif write.ends is not WriteState.DONE and self.rng.random() < 0.3:
                write.known = write.ends
                if write.ends is WriteState.FAILED:
                    write.pieces.clear()
        self.writes = [w for w in self.writes if w.pieces or w.known is WriteState.PENDING]


class SimLinks:
    """See ``links.Links``."""

    def __init__(self, net: SimNet, name: str) -> None:
        self._net, self.name = net, name
        self.address = f"{name}:1"
        net.node(name)

    def send(self, peer: str, kind: FrameType, body: bytes = b"") -> bool:
        if (self.name, peer) not in self._net.links:
            return False
        self._net.push(self.name, peer, kind, body)
        return True

    def rename(self, old: str, new: str) -> None:
        pass

    def drop(self, peer: str) -> None:
        self._net.links -= {(self.name, peer), (peer, self.name)}
        self._net.node(peer).signals.append((self._net.clock.now() + 0.05, Lost(self.name, "dropped")))

    def is_up(self, peer: str) -> bool:
        return (self.name, peer) in self._net.links

    def poll(self, timeout_s: float) -> list[Event]:
        return self._net.due(self.name)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class SimTransport:
    """See ``transport.Transport``."""

    name = "sim"

    def __init__(self, net: SimNet, node: str) -> None:
        self._net, self._node = net, node
        self.carries_notes = net.carries_notes
        self._peers: dict[str, tuple[LayerBuffer, ...]] = {}

    def register(self, buffers: Sequence[LayerBuffer]) -> None:
        self._buffers = tuple(buffers)

    def metadata(self) -> bytes:
        return self._node.encode()

    def connect(self, peer: str, metadata: bytes, buffers: Sequence[LayerBuffer]) -> SimWrite:
        self._peers[peer] = tuple(buffers)
        write = SimWrite(self._node, peer, deque(), b"", WriteState.DONE)
        self._net.writes.append(write)
        return write

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def post(self, peer: str, rows: Rows, note: bytes) -> SimWrite:
        if peer not in self._peers or not self._net.node(peer).is_alive:
            raise StoreError("write", "the peer is gone", path=peer)
        pieces = [
            (
                self._buffers[at].addr + int(a) * self._buffers[at].item_bytes,
                self._peers[peer][at].addr + int(b) * self._buffers[at].item_bytes,
                self._buffers[at].item_bytes,
            )
            for at, here, there in rows
            for a, b in zip(here, there, strict=True)
        ]
        self._net.rng.shuffle(pieces)
        fails = WriteState.FAILED if self.carries_notes else WriteState.LOST
        ends = fails if self._net.rng.random() < self._net.fault_rate else WriteState.DONE
        write = SimWrite(self._node, peer, deque(pieces), note, ends)
        self._net.writes.append(write)
        return write

    def poll_notes(self) -> list[bytes]:
        notes = self._net.node(self._node).notes
        found = [n for n in notes if n]
        notes.clear()
        return found

    def close(self) -> None:
        pass
