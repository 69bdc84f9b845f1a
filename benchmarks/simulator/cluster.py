"""A cluster of simulated nodes: NVMe in each, one shared remote tier behind the nodes' NICs, a prefix-aware router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_hicache_ext.policy import PolicySettings, make_policy
from sglang_hicache_ext.testing.latency import Constant
from simulator.cache import LruPages
from simulator.engine import Node
from simulator.link import SharedLink
from simulator.loop import EventLoop
from simulator.results import RunColumns
from simulator.spec import NodeSpec
from simulator.storage import LocalStorage
from simulator.trace import Load, Request

IMBALANCE_TOKENS = 65_536
"""Tokens of extra queue a router accepts for the sake of a cached prefix."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What the cluster is made of.

    Attributes:
        nodes: prefill nodes, all alike; ``node`` gives everything but L3.
        drives: NVMe drives per node; 0 for none.
        drive_read_Bps, drive_write_Bps, drive_bytes: of one drive.
        drive_delay_s: time to the first byte of a batch.
        nic_Bps: what one node may take from the network for KV pages, one direction; 0 for no remote tier.
        remote_Bps: what the remote tier delivers to all nodes together.
        remote_bytes: capacity of the remote tier; 0 for no limit.
        remote_delay_s: time to the first byte of a batch.
    """

    nodes: int = 4
    node: NodeSpec = field(default_factory=NodeSpec)
    drives: int = 1
    drive_read_Bps: float = 6.5e9
    drive_write_Bps: float = 3.5e9
    drive_bytes: float = 3.2e12
    drive_delay_s: float = 0.0005
    nic_Bps: float = 12.5e9
    remote_Bps: float = 50e9
    remote_bytes: float = 0.0
    remote_delay_s: float = 0.003


class RemoteTier:
    """Pages that every node can reach, and one link per NIC; busy NICs share the tier's own bandwidth equally."""

    def __init__(self, loop: EventLoop, spec: ClusterSpec, page_bytes: float, stored: Sequence[int]) -> None:
        capacity = max(1, int(spec.remote_bytes / page_bytes)) if spec.remote_bytes else None
        self.pages = LruPages(capacity, stored)
        self._spec, self._busy = spec, 0
        self.links = [SharedLink(loop, max(1.0, spec.nic_Bps), on_busy=self._on_busy) for _ in range(spec.nodes)]

    def _on_busy(self, is_busy: bool) -> None:
        self._busy += 1 if is_busy else -1
        share = min(self._spec.nic_Bps, self._spec.remote_Bps / max(1, self._busy))
        for link in self.links:
            link.set_capacity(max(1.0, share))


class NodeStorage:
    """L3 of one node: its drives in front of the remote tier. A page read from the remote tier stays on the drive."""

    def __init__(
        self,
        loop: EventLoop,
        spec: ClusterSpec,
        page_bytes: float,
        remote: RemoteTier,
        number: int,
        stored: Sequence[int],
    ) -> None:
        self._loop, self._spec, self._remote, self._link = loop, spec, remote, remote.links[number]
        self._has_remote = spec.nic_Bps > 0
        self.drives: LocalStorage | None = None
        if spec.drives:
            capacity = max(1, int(spec.drives * spec.drive_bytes / page_bytes))
            speed = spec.drives * spec.drive_read_Bps
            held = () if self._has_remote else stored
            self.drives = LocalStorage(loop, Constant(base_s=spec.drive_delay_s), speed, 0.0, capacity, held)

    def holds(self, page: int) -> bool:
        return bool(self.drives and self.drives.holds(page)) or (self._has_remote and page in self._remote.pages)

    def prefix(self, pages: Sequence[int], start: int) -> int:
        for i in range(start, len(pages)):
            if not self.holds(pages[i]):
                return i - start
        return len(pages) - start

    def add(self, pages: Sequence[int]) -> None:
        if self.drives:
            self.drives.add(pages)
        if self._has_remote:
            self._remote.pages.add(pages)

    def read(self, pages: Sequence[int], page_bytes: float, on_done: Callable[[], None]) -> None:
        """Both tiers deliver at the same time; done when the slower one is."""
        near = [p for p in pages if self.drives and self.drives.holds(p)]
        far = len(pages) - len(near)
        left = bool(near) + bool(far)

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left:
                if far and self.drives:
                    self.drives.add(pages)
                on_done()

        if near and self.drives:
            self.drives.read(near, page_bytes, arrived)
        if far:
            self._loop.at(self._loop.now + self._spec.remote_delay_s, self._link.send, far * page_bytes, arrived)


class Router:
    """Sends a request to the node that last served its longest prefix, unless that node is far busier than the idlest."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._served: dict[int, int] = {}

    def arrive(self, index: int, request: Request) -> None:
        loads = [n.load_tokens for n in self._nodes]
        idlest = loads.index(min(loads))
        known = next((self._served[p] for p in reversed(request.pages) if p in self._served), idlest)
        chosen = known if loads[known] <= loads[idlest] + IMBALANCE_TOKENS else idlest
        self._served.update(dict.fromkeys(request.pages, chosen))
        self._nodes[chosen].arrive(index, request)


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """What a cluster run gives.

    Attributes:
        ttft_s: per request of the load, in order.
        columns: per node.
        drive_bytes, network_bytes: read over the whole run, all nodes.
        drive_busy, network_busy: share of the run in which the busiest node's drives (NIC) moved anything.
        stored_bytes: in the remote tier (the drives without one) at the end.
    """

    ttft_s: list[float]
    columns: list[RunColumns]
    drive_bytes: float
    network_bytes: float
    drive_busy: float
    network_busy: float
    stored_bytes: float

    @property
    def gpu_busy_s(self) -> float:
        return sum(c.gpu_busy_s for c in self.columns)


def simulate_cluster(
    load: Load, spec: ClusterSpec, policy: str, settings: PolicySettings | None = None
) -> ClusterResult:
    """Replay ``load`` on the cluster under one policy."""
    loop, page_bytes = EventLoop(), float(load.page_tokens * spec.node.kv_bytes_per_token)
    remote = RemoteTier(loop, spec, page_bytes, load.stored)
    rule = make_policy(policy, settings or PolicySettings(page_tokens=load.page_tokens))
    stores = [NodeStorage(loop, spec, page_bytes, remote, i, load.stored) for i in range(spec.nodes)]
    nodes = [Node(loop, spec.node, load.page_tokens, rule, s) for s in stores]
    router = Router(nodes)
    for index, request in enumerate(load.requests):
        loop.at(request.arrival_s, router.arrive, index, request)
    loop.run()
    ttft = {i: v for n in nodes for i, v in n.columns.ttft_s.items()}
    drives = [s.drives.link for s in stores if s.drives]
    held = len(remote.pages) if spec.nic_Bps > 0 else sum(s.drives.stored_pages for s in stores if s.drives)
    return ClusterResult(
        [ttft[i] for i in range(len(ttft))],
        [n.columns for n in nodes],
        sum(d.moved_bytes for d in drives),
        sum(link.moved_bytes for link in remote.links),
        max((d.busy_s for d in drives), default=0.0) / loop.now,
        max(link.busy_s for link in remote.links) / loop.now,
        held * page_bytes,
    )


def copies(load: Load, count: int, shift_s: float = 1.0) -> Load:
    """``count`` independent copies of a load at once, each with page ids of its own, started ``shift_s`` apart."""
    stride = 1 + max(max(r.pages, default=0) for r in load.requests)
    made = [
        Request(r.arrival_s + c * shift_s, r.input_tokens, r.output_tokens, tuple(p + c * stride for p in r.pages))
        for c in range(count)
        for r in load.requests
    ]
    made.sort(key=lambda r: r.arrival_s)
    stored = tuple(p + c * stride for c in range(count) for p in load.stored)
    return Load(load.name, load.page_tokens, tuple(made), stored, f"{load.source}, {count} copies")
