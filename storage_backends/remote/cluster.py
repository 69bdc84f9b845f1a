"""A Mooncake cluster on loopback: for tests, for benchmarks and for learning. Not for production.

etcd (Debian package ``etcd-server``), one or two masters, and store nodes, each a process of its own, each ended by its id.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from sglang_hicache_ext.errors import CapabilityError

START_TIMEOUT_S = 20.0


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def binary(name: str) -> str:
    """Path of a program. Raises CapabilityError naming the package it comes from."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found:
        return found
    package = "apt install etcd-server" if name == "etcd" else "pip install mooncake-transfer-engine-non-cuda"
    raise CapabilityError(f"{name} is not installed", "the local cluster", package)


def wait_until(check: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Poll ``check`` every 20 ms; returns the seconds it took. Raises TimeoutError naming ``what``."""
    started = time.monotonic()
    while not check():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
    return time.monotonic() - started


def accepts(port: int) -> bool:
    """True when something listens on 127.0.0.1:port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Node:
    """One process of the cluster."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    metrics_port: int = 0

    def metric(self, name: str) -> float:
        """A number from the Prometheus page of a master; 0.0 when it has none of that name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return next((float(x.split()[-1]) for x in lines if x.startswith(f"{name} ")), 0.0)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> None:
        """End it, stopped or not; returns when it is gone."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            if number != signal.SIGKILL:
                self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@dataclass
class LocalCluster:
    """Starts on ``__enter__``, ends every process on ``__exit__``.

    Attributes:
        folder: logs, etcd's data, the nodes' SSD folders.
        masters: 1, or 2 with etcd and the operation log, so that keys survive a fail-over.
        nodes: store nodes at the start; ``add_node`` starts more.
        node_bytes: memory that each store node lends.
        client_ttl_s: seconds until the master gives up on a silent node.
        lease_ms: how long a read or a hit query protects an object.
        offload: store nodes write objects to an SSD folder too.
        protocol: what store nodes speak, "tcp" or "rdma".
    """

    folder: Path
    masters: int = 1
    nodes: int = 1
    node_bytes: int = 256 << 20
    client_ttl_s: int = 5
    lease_ms: int = 3000
    offload: bool = False
    protocol: str = "tcp"
    running: list[Node] = field(default_factory=list)

    def __enter__(self) -> LocalCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._etcd_port = self.start_etcd().port if self.masters > 1 else 0
            for _ in range(self.masters):
                self.add_master()
            for _ in range(self.nodes):
                self.add_node()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        for node in reversed(self.running):
            node.end()
        self.running.clear()

    @property
    def master_address(self) -> str:
        """What clients take as ``master``."""
        if self.masters > 1:
            return f"etcd://127.0.0.1:{self._etcd_port}"
        return f"127.0.0.1:{self.of_kind('master')[0].port}"

    def of_kind(self, kind: str) -> list[Node]:
        return [n for n in self.running if n.name.startswith(kind)]

    def start_etcd(self) -> Node:
        port, peer = free_port(), free_port()
        url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        node = self._spawn(
            "etcd", port, "--name=one", f"--data-dir={self.folder / 'etcd'}", f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}", f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}", f"--initial-cluster=one={peer_url}",
        )  # fmt: skip
        wait_until(lambda: accepts(port), START_TIMEOUT_S, f"etcd, see {node.log}")
        return node

    def add_master(self, port: int = 0) -> Node:
        """Start a master; with ``port`` at that port, to come back where an earlier one was."""
        port, metrics = port or free_port(), free_port()
        high_availability = [
            "--enable_ha=true", f"--etcd_endpoints=127.0.0.1:{self._etcd_port}", "--enable_oplog=true",
            "--oplog_poll_interval_ms=200",
        ] if self.masters > 1 else []  # fmt: skip
        node = self._spawn(
            "mooncake_master", port, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}", f"--default_kv_lease_ttl={self.lease_ms}", f"--client_ttl={self.client_ttl_s}",
            "--rpc_thread_num=2", f"--enable_offload={str(self.offload).lower()}", *high_availability,
        )  # fmt: skip
        node.metrics_port = metrics
        if self.masters == 1:
            wait_until(lambda: accepts(port), START_TIMEOUT_S, f"mooncake_master, see {node.log}")
        return node

    def add_node(self) -> Node:
        """Start a store node and wait until it lends its memory."""
        folder = self.folder / f"ssd{len(self.running)}"
        folder.mkdir(exist_ok=True)
        return self._start_node(folder)

    def restart_node(self, node: Node) -> Node:
        """Start a node that has ended again, on the SSD folder of the old one."""
        return self._start_node(self.folder / f"ssd{self.running.index(node)}")

    def _start_node(self, folder: Path) -> Node:
        port, before = free_port(), _mounted(self.folder)
        node = self._spawn(
            "mooncake_client", port, "--host=127.0.0.1", f"--global_segment_size={self.node_bytes}",
            f"--master_server_address={self.master_address}", "--metadata_server=P2PHANDSHAKE", f"--port={port}",
            f"--protocol={self.protocol}", f"--enable_offload={str(self.offload).lower()}",
            environment={
                "MC_TCP_BIND_ADDRESS": "127.0.0.1", "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
                "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1", "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "16",
                "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
            },
        )  # fmt: skip
        wait_until(
            lambda: _mounted(self.folder) > before and accepts(port),
            START_TIMEOUT_S,
            f"mooncake_client, see {node.log}",
        )
        return node

    def _spawn(self, program: str, port: int, *args: str, environment: dict[str, str] | None = None) -> Node:
        name = f"{program.removeprefix('mooncake_')}-{len(self.running)}"
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [binary(program), *args], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder,
                env=_environment(self.protocol, environment or {}), start_new_session=True,
            )  # fmt: skip
        node = Node(name, process, port, log)
        self.running.append(node)
        return node


def _environment(protocol: str, extra: dict[str, str]) -> dict[str, str]:
    forced = {"MC_FORCE_TCP": "true"} if protocol == "tcp" else {"MC_FORCE_HCA": "1"}
    return {**os.environ, **forced, "GLOG_logtostderr": "1", **extra}


def _mounted(folder: Path) -> int:
    """Segments the masters say they have mounted, from their logs."""
    return sum(log.read_text(errors="replace").count("mount_segment") for log in folder.glob("master-*.log"))
