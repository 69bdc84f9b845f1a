"""kvikio into device memory: GPUDirect Storage where it is, kvikio's own staging where it is not.

kvikio falls back silently (no nvidia-fs, no /run/udev, a file system without DMA), twice even: its own compatibility
mode and cuFile's. What is in use is therefore read back and reported, and bytes are proven whichever way they came.
"""

from __future__ import annotations

from typing import Any

from sglang_hicache_ext.storage_backends.engines.kvikio_engine import KvikioEngine


class DeviceSpan:
    """``nbytes`` of device memory at ``addr``, as kvikio takes it. The owner of the plan keeps the memory alive."""

    def __init__(self, addr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (addr, False),
            "strides": None,
            "version": 3,
        }


class KvikioDeviceEngine(KvikioEngine):
    """As KvikioEngine, but memory pieces are device addresses.

    Attributes:
        registered, refused: device allocations given to cuFile, and why others were not.
    """

    name = "kvikio_device"

    def __init__(self, directory: str, *, depth: int = 32, threads: int = 8, probe_timeout_s: float = 30.0) -> None:
        super().__init__(directory, depth=depth, threads=threads, probe_timeout_s=probe_timeout_s)
        self._buffers: list[tuple[Any, Any]] = []
        self.registered, self.refused = 0, ""

    def piece(self, addr: int, size: int) -> Any:
        return DeviceSpan(addr, size)

    def register_buffer(self, addr: int, nbytes: int, owner: Any) -> bool:
        """Give the whole allocation that the span lies in to cuFile; ``owner`` stays referenced until ``close``."""
        from kvikio import buffer as kvikio_buffer

        span = self.piece(addr, nbytes)
        try:
            kvikio_buffer.memory_register(span)
        except (RuntimeError, ValueError) as error:
            self.refused = str(error)
            return False
        self._buffers.append((span, owner))
        self.registered += 1
        return True

    def describe(self) -> dict[str, Any]:
        path, why = effective_path()
        return {
            **super().describe(),
            "engine": self.name,
            "path": path,
            "path_reason": why,
            "registered_memory": self.registered > 0,
            "registered_memory_reason": self.refused or f"{self.registered} device allocations",
        }

    def close(self) -> None:
        from kvikio import buffer as kvikio_buffer

        super().close()
        while self._buffers:
            try:
                kvikio_buffer.memory_deregister(self._buffers.pop()[0])
            except (RuntimeError, ValueError) as error:
                self.refused = str(error)


def effective_path() -> tuple[str, str]:
    """("gds" or "compat", how that is known) for device memory in this process."""
    import kvikio.cufile_driver
    import kvikio.defaults

    if kvikio.defaults.is_compat_mode_preferred():
        return "compat", f"kvikio's compatibility mode is {kvikio.defaults.get('compat_mode')}: POSIX and a copy"
    try:
        properties = kvikio.cufile_driver
        available = bool(properties.get("is_gds_available"))
        lenient = bool(properties.get("allow_compat_mode"))
    except (RuntimeError, KeyError, ValueError) as error:
        return "compat", f"the cuFile driver does not answer: {error}"
    if not available:
        return "compat", "cuFile says that GDS is not available"
    if lenient:
        return (
            "gds",
            "cuFile says that GDS is available; its own compatibility mode is allowed, so single files may differ",
        )
    return "gds", "cuFile says that GDS is available and its compatibility mode is off"
