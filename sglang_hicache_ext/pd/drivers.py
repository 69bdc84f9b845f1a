"""Chooses the driver that moves the bytes."""

from __future__ import annotations

from sglang_hicache_ext.pd.settings import PdSettings
from sglang_hicache_ext.pd.transport import Transport


def make_transport(settings: PdSettings, host: str = "127.0.0.1") -> Transport:
    """A driver, not yet registered.

    Args:
        host: own address as the peers reach it; Mooncake listens there.
    """
    if settings.transport == "mooncake":
        from sglang_hicache_ext.pd.mooncake import MooncakeTransport

        return MooncakeTransport(host)
    from sglang_hicache_ext.pd.nixl import NixlTransport

    return NixlTransport(settings.ucx)
