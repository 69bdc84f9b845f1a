"""What this machine and the address given can do, found out before anything is started. One message per obstacle."""

from __future__ import annotations

import resource
import socket
from dataclasses import dataclass
from pathlib import Path

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import CapabilityError, ConfigError

WHERE = "the remote tier"
CONNECT_TIMEOUT_S = 1.0
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Transport:
    """Requested and effective transport, and why they differ."""

    requested: str
    effective: str
    reason: str


def active_rdma_ports(root: Path = _INFINIBAND) -> list[str]:
    """ "device:port" of every RDMA port whose link is active."""
    found = []
    for state in sorted(root.glob("*/ports/*/state")):
        try:
            if "ACTIVE" in state.read_text():
                found.append(f"{state.parts[-4]}:{state.parts[-2]}")
        except OSError:
            continue
    return found


def choose_transport(config: HiCacheExtConfig, root: Path = _INFINIBAND) -> Transport:
    """Apply ``transport``. Raises CapabilityError when rdma is asked for and cannot be."""
    if config.transport == "tcp":
        return Transport("tcp", "tcp", "asked for")
    ports = active_rdma_ports(root)
    obstacle = _rdma_obstacle(config, ports, root)
    if config.transport == "rdma" and obstacle:
        raise CapabilityError(f"transport is rdma, but {obstacle}", WHERE, "mend that, or write transport: tcp")
    if obstacle:
        return Transport(config.transport, "tcp", obstacle)
    return Transport(config.transport, "rdma", f"active: {', '.join(ports)}")


def _rdma_obstacle(config: HiCacheExtConfig, ports: list[str], root: Path) -> str:
    if not ports:
        return f"no RDMA port under {root} is active"
    wanted = [d for d in config.rdma_devices.split(",") if d]
    missing = sorted(set(wanted) - {p.split(":")[0] for p in ports})
    if missing:
        return f"rdma_devices names {', '.join(missing)}, and only {', '.join(ports)} are active"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < config.staging:
        return f"only {soft} bytes may be locked and the staging ring needs {config.staging} (LimitMEMLOCK=infinity)"
    return ""


def master_addresses(master: str) -> list[tuple[str, int]]:
    """The endpoints in ``master``: "host:port" or "etcd://host:port;host:port". Raises ConfigError."""
    text = master.removeprefix("etcd://")
    found = []
    for part in text.split(";"):
        host, _, port = part.removeprefix("http://").rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                f"master is {master!r}", WHERE, "write host:port, or etcd://host:port;host:port with several masters"
            )
        found.append((host.strip("[]"), int(port)))
    return found


def unreachable(master: str) -> str:
    """Why none of the addresses accepts a connection; "" when one does."""
    reasons = []
    for host, port in master_addresses(master):
        try:
            socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
            return ""
        except OSError as error:
            reasons.append(f"{host}:{port}: {error}")
    return "; ".join(reasons)


def own_address(config: HiCacheExtConfig) -> str:
    """The address that peers use to reach this process: the one that routes to the master."""
    if config.remote_host:
        return config.remote_host
    host, port = master_addresses(config.master)[0]
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def read_secret(config: HiCacheExtConfig) -> bytes:
    """The tenant's secret, b"" when none is configured. Raises ConfigError."""
    if not config.tenant_secret_file:
        return b""
    path = Path(config.tenant_secret_file)
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read tenant_secret_file: {error}", str(path), "make it readable") from error
    if len(secret) < 16:
        raise ConfigError(f"the tenant secret has {len(secret)} bytes", str(path), "use 16 or more random bytes")
    if mode & 0o077:
        raise ConfigError(f"others may read the tenant secret (mode {mode & 0o777:o})", str(path), "chmod 600")
    return secret
