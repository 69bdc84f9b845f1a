"""kvikio straight into the pool. Bytes are proven where they are: by sums computed on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.sglang_adapter.linker_pools import WHERE, DevicePool
from sglang_hicache_ext.sglang_adapter.linker_sums import run_sums
from sglang_hicache_ext.storage_backends.engines.kvikio_device import KvikioDeviceEngine, effective_path
from sglang_hicache_ext.storage_backends.nvme.lanes import Lanes
from sglang_hicache_ext.storage_backends.nvme.layered_reads import LayeredRead, LayerResult
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore

OpenEngine = Callable[[str, int], KvikioDeviceEngine]


def _open(directory: str, depth: int) -> KvikioDeviceEngine:
    return KvikioDeviceEngine(directory, depth=depth)


class GdsPath:
    """kvikio CuFile reads into device memory, awaited by threads of the engine, so that every call has a deadline.

    Raises:
        CapabilityError: kvikio does not work, or would stage every read itself (our own ring does that better).
    """

    name = "gds"
    writes_late = True

    def __init__(
        self,
        store: NvmeStore,
        pools: list[DevicePool],
        *,
        depth: int,
        open_engine: OpenEngine = _open,
        allow_compat: bool = False,
    ) -> None:
        self._engine = open_engine(str(store.layout.segment_dir(0)), depth)
        path, why = effective_path()
        if path != "gds" and not allow_compat:
            self._engine.close()
            raise CapabilityError(f"no GPUDirect Storage: {why}", WHERE, "see `hicache-ext doctor --gds`")
        self._why = why
        allocations = {b.untyped_storage().data_ptr(): b for p in pools for buffers in p.buffers for b in buffers}
        for addr, buffer in allocations.items():
            self._engine.register_buffer(addr, buffer.untyped_storage().nbytes(), buffer)
        self.lanes: Lanes | None = Lanes(store.layout, [self._engine])

    def read_layer(
        self, read: LayeredRead, pool: DevicePool, layer: int, rows: NDArray[np.int64], deadline: float
    ) -> LayerResult:
        def sums(at: NDArray[np.int64]) -> NDArray[np.int64]:
            return run_sums(pool, layer, rows[at])

        regions = pool.regions(layer, rows)
        result = read.read_layer(layer, np.arange(len(rows)), regions, deadline, sums)
        if pool.device.type == "cuda":
            torch.cuda.current_stream(pool.device).synchronize()
        return result

    def describe(self) -> dict[str, Any]:
        return {"path": self.name, "reason": self._why, "engine": self._engine.describe()}

    def close(self) -> None:
        if self.lanes is not None:
            self.lanes.close()
