"""The settings of the PD hooks, taken from the one config of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_hicache_ext.config import MIB, HiCacheExtConfig


@dataclass(frozen=True, slots=True)
class PdSettings:
    """See ``docs/pd.md``; the names here are the config keys without ``pd_``.

    Attributes:
        transport: driver, "nixl" or "mooncake".
        group: least bytes of a layer group; one layer is never cut.
        layered_min: a chunk of fewer bytes goes as one group, whatever its layers do.
        deadline_s: seconds from the start of a forward until a send that is not over counts as failed.
        drain_s: seconds of own progress after a peer's proven end, in which its last bytes still arrive.
        ucx: engine configuration for UCX, for example "TLS=tcp,NET_DEVICES=eth0"; "" lets it choose.
        max_open: transfers open at a time; further reservations are refused.
        arbiter: shared-memory arbiter to announce transfers to; "" for none.
    """

    transport: str = "nixl"
    group: int = 4 * MIB
    layered_min: int = 8 * MIB
    deadline_s: float = 60.0
    drain_s: float = 2.0
    ucx: str = ""
    max_open: int = 4096
    arbiter: str = ""

    @classmethod
    def of(cls, config: HiCacheExtConfig) -> PdSettings:
        return cls(
            transport=config.pd_transport,
            group=config.pd_group,
            layered_min=config.pd_layered_min,
            deadline_s=config.pd_deadline_s,
            drain_s=config.pd_drain_s,
            ucx=config.pd_ucx,
            max_open=config.pd_max_open,
            arbiter=config.arbiter,
        )

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "PD settings") -> PdSettings:
        """Raises ConfigError naming the key, the value and what to write instead."""
        return cls.of(HiCacheExtConfig.parse(raw, where))
