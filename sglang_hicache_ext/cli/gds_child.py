"""GPUDirect Storage, one stage after another with a real page: python -m sglang_hicache_ext.cli.gds_child DIRECTORY.

A process of its own, because a broken driver makes kvikio hang. Prints one JSON object a stage; the last one is the
verdict. Device memory comes from the CUDA driver itself, so that neither torch nor cupy is needed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE_BYTES = 1 << 20
NVFS_STATS = Path("/proc/driver/nvidia-fs/stats")


class CudaError(Exception):
    """A call of the CUDA driver failed."""


class DeviceMemory:
    """``PAGE_BYTES`` bytes on device 0, as kvikio takes them."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context, device, pointer = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(PAGE_BYTES))
        self._pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (PAGE_BYTES,), "typestr": "|u1", "data": (pointer.value, False), "strides": None, "version": 3,
        }  # fmt: skip

    def _call(self, name: str, *args: Any) -> None:
        function = getattr(self._cuda, name, None)
        code = function(*args) if function is not None else -1
        if code != 0:
            raise CudaError(f"{name} answers {code}")

    def content(self) -> bytes:
        host = ctypes.create_string_buffer(PAGE_BYTES)
        self._call("cuMemcpyDtoH_v2", host, self._pointer, ctypes.c_size_t(PAGE_BYTES))
        return host.raw


class Stages:
    """The run; a stage that fails ends it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._page = os.urandom(PAGE_BYTES)

    def run(self) -> bool:
        for name in ("library", "driver", "handle", "buffer", "registration", "read", "verify", "verdict"):
            stage: Callable[[], str] = getattr(self, f"_{name}")
            try:
                say(name, True, stage())
            except Exception as error:
                say(name, False, f"{type(error).__name__}: {error}")
                return False
        return True

    def _library(self) -> str:
        import kvikio

        return f"kvikio {kvikio.__version__}"

    def _driver(self) -> str:
        from kvikio import cufile_driver

        names = ("is_gds_available", "major_version", "minor_version", "allow_compat_mode")
        return ", ".join(f"{n} {cufile_driver.get(n)}" for n in names)

    def _handle(self) -> str:
        import kvikio

        handle, path = tempfile.mkstemp(prefix=".gds-probe-", dir=self._directory)
        with os.fdopen(handle, "wb") as f:
            f.write(self._page)
            f.flush()
            os.fsync(f.fileno())
        try:
            self._file = kvikio.CuFile(path, "r")
        finally:
            os.unlink(path)
        return f"direct I/O supported: {self._file.is_direct_io_supported()}"

    def _buffer(self) -> str:
        self._memory = DeviceMemory()
        return f"{PAGE_BYTES} bytes on device 0"

    def _registration(self) -> str:
        from kvikio import buffer, defaults

        buffer.memory_register(self._memory)
        return "without effect in compatibility mode" if defaults.is_compat_mode_preferred() else "given to cuFile"

    def _read(self) -> str:
        self._before = nvfs_reads()
        moved = self._file.pread(self._memory, PAGE_BYTES, 0).get()
        if moved != PAGE_BYTES:
            raise OSError(f"{moved} of {PAGE_BYTES} bytes")
        return f"{moved} bytes"

    def _verify(self) -> str:
        if self._memory.content() != self._page:
            raise ValueError("the bytes on the device are not those of the file")
        return "the device holds what the file holds"

    def _verdict(self) -> str:
        from sglang_hicache_ext.storage_backends.engines.kvikio_device import effective_path

        path, why = effective_path()
        after = nvfs_reads()
        counted = "" if after is None else f"; nvidia-fs counted {after - (self._before or 0)} reads of this page"
        return f"{path}: {why}{counted}"


def nvfs_reads(stats: Path = NVFS_STATS) -> int | None:
    """Reads that nvidia-fs has done so far; None without it. Source: the "Reads" line of its stats file."""
    try:
        lines = stats.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Reads"):
            digits = "".join(c if c.isdigit() else " " for c in line.split("n=")[-1]).split()
            return int(digits[0]) if digits else None
    return None


def say(stage: str, ok: bool, what: str) -> None:
    print(json.dumps({"stage": stage, "ok": ok, "what": what}), flush=True)


if __name__ == "__main__":
    sys.exit(0 if Stages(sys.argv[1]).run() else 1)
