"""Mooncake Store behind the ObjectEngine interface. Standard library and ``mooncake`` only: runs in the worker process.

Source: mooncake-transfer-engine 0.3.13, store bindings; error codes from its types.h.
"""

from __future__ import annotations

import os
import re
from typing import Any

LOCAL_BUFFER_BYTES = 16 << 20
"""Mooncake's own scratch memory, used by the few calls that do not take registered memory."""


def _environment(settings: dict[str, Any]) -> None:
    """Mooncake reads these when it is loaded; what the operator has set wins."""
    os.environ.setdefault("GLOG_minloglevel", "0" if settings.get("log") else "2")
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", settings["host"])
    if settings["transport"] == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "true")  # tcp alone may still bring up RDMA
    else:
        os.environ.setdefault("MC_FORCE_HCA", "1")  # a wrong device list falls back to TCP in silence


class MooncakeEngine:
    """A pure client: it lends the pool no memory, so its end takes no page with it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        _environment(settings)
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._settings = settings
        self._store = MooncakeDistributedStore()
        self._config = ReplicateConfig()
        self._config.replica_num = settings["replicas"]
        self._forever = ReplicateConfig()
        self._forever.with_hard_pin = True

    def open(self, addr: int, nbytes: int) -> dict[str, Any]:
        s = self._settings
        code = self._store.setup(
            s["host"], s["metadata"], 0, LOCAL_BUFFER_BYTES, s["transport"], s["devices"], s["master"]
        )
        if code:
            raise RuntimeError(f"setup returned {code}")
        code = self.register(addr, nbytes)
        if code:
            raise RuntimeError(f"registering {nbytes} bytes of staging memory returned {code}")
        return {"endpoint": self._store.get_hostname()}

    def register(self, addr: int, nbytes: int) -> int:
        return int(self._store.register_buffer(addr, nbytes))

    def get(self, names: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        return list(self._store.batch_get_into(names, addrs, sizes))

    def get_parts(self, names: list[str], addrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        return list(self._store.batch_get_into_multi_buffers(names, addrs, sizes))

    def put(self, names: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        return list(self._store.batch_put_from(names, addrs, sizes, self._config))

    def pin(self, names: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        """A put that is never evicted, for the few small objects that describe the cluster."""
        return list(self._store.batch_put_from(names, addrs, sizes, self._forever))

    def exist(self, names: list[str]) -> list[int]:
        return list(self._store.batch_is_exist(names))

    def remove(self, names: list[str]) -> list[int]:
        return list(self._store.batch_remove(names, True))  # force: what we remove is proven bad, lease or not

    def remove_prefix(self, prefix: str) -> int:
        return int(self._store.remove_by_regex("^" + re.escape(prefix), True))

    def peers(self, names: list[str]) -> list[list[str]]:
        found = self._store.batch_get_replica_desc(names)
        return [_memory_endpoints(found.get(name, ())) for name in names]

    def close(self) -> None:
        self._store.close()


def _memory_endpoints(replicas: Any) -> list[str]:
    memory = [r.get_memory_descriptor() for r in replicas if r.is_memory_replica()]
    return [str(m.buffer_descriptor.transport_endpoint) for m in memory]
