"""Which transport, which address, and the messages when it cannot be."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import CapabilityError, ConfigError
from sglang_hicache_ext.storage_backends.remote import capability
from sglang_hicache_ext.storage_backends.remote.store import RemoteStore


def config(**keys: Any) -> HiCacheExtConfig:
    return HiCacheExtConfig.parse({"master": "127.0.0.1:1", **keys})


@pytest.fixture
def nics(tmp_path: Path) -> Callable[..., Path]:
    def make(**states: str) -> Path:
        for device, state in states.items():
            port = tmp_path / device / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text(state)
        return tmp_path

    return make


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_auto_takes_rdma_where_a_port_is_active(nics: Callable[..., Path], unlimited: None) -> None:
    root = nics(mlx5_0="4: ACTIVE\n", mlx5_1="1: DOWN\n")
    assert capability.active_rdma_ports(root) == ["mlx5_0:1"]
    assert capability.choose_transport(config(), root).effective == "rdma"
    assert capability.choose_transport(config(transport="tcp"), root).effective == "tcp"


def test_auto_falls_back_and_says_why_and_rdma_refuses(nics: Callable[..., Path]) -> None:
    root = nics(mlx5_0="1: DOWN\n")
    chosen = capability.choose_transport(config(), root)
    assert (chosen.requested, chosen.effective) == ("auto", "tcp") and "no RDMA port" in chosen.reason
    with pytest.raises(CapabilityError, match="no RDMA port"):
        capability.choose_transport(config(transport="rdma"), root)


def test_a_device_that_is_not_active_is_named(nics: Callable[..., Path], unlimited: None) -> None:
    root = nics(mlx5_0="4: ACTIVE\n")
    with pytest.raises(CapabilityError, match="mlx5_7"):
        capability.choose_transport(config(transport="rdma", rdma_devices="mlx5_0,mlx5_7"), root)


def test_too_little_lockable_memory_is_named(nics: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    with pytest.raises(CapabilityError, match="LimitMEMLOCK"):
        capability.choose_transport(config(transport="rdma"), nics(mlx5_0="4: ACTIVE\n"))


@pytest.mark.parametrize(
    ("master", "found"),
    [
        ("10.0.0.1:50051", [("10.0.0.1", 50051)]),
        ("etcd://a:1;b:2", [("a", 1), ("b", 2)]),
        ("[::1]:5", [("::1", 5)]),
    ],
)
def test_masters_are_read(master: str, found: list[tuple[str, int]]) -> None:
    assert capability.master_addresses(master) == found


@pytest.mark.parametrize("master", ["", "host", "host:", ":5", "etcd://a:1;b"])
def test_a_master_that_is_no_address_is_refused_with_an_example(master: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        RemoteStore(HiCacheExtConfig.parse({"master": master}))


def test_a_ring_too_small_for_its_lanes_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small for 64 lanes"):
        RemoteStore(config(staging="1MiB", remote_lanes=64))


def test_the_own_address_is_the_one_that_routes_to_the_master() -> None:
    assert capability.own_address(config()) == "127.0.0.1"
    assert capability.own_address(config(remote_host="10.9.8.7")) == "10.9.8.7"
