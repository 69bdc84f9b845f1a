"""The table behind the planner: what is known of each GPU, and the tile for each shape. Pure Python.

``tuning.json`` is the shipped table; ``benchmarks/bench_l2_prefetch.py`` writes a new one on a GPU.
A row whose ``measured`` is empty is a guess from compiled registers, and prefetch stays off for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from sglang_hicache_ext.errors import ConfigError

FORMAT = 1
PATH = Path(__file__).with_name("tuning.json")
HEAD_DIMS = (64, 128, 256)
PAGE_TOKENS = (1, 16, 64)
GROUPS = tuple(range(1, 17))
KV_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per element of each KV dtype; fp8 is e4m3 or e5m2."""
FORMS = ("none", "line", "bulk")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the planner sees it.

    Attributes:
        name: as torch reports it.
        sm: compute capability times ten, 90 for Hopper.
        sms: streaming multiprocessors.
        l2_bytes: L2 cache.
        smem_per_sm: shared memory of one SM, bytes.
        bandwidth: memory bandwidth in bytes per second; 0 when unknown.
    """

    name: str
    sm: int
    sms: int
    l2_bytes: int
    smem_per_sm: int
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class Tile:
    """How one CTA works, and what prefetch gained when it was measured.

    Attributes:
        gpu: GPU name, or "*" for any.
        group: query heads per KV head, or 0 for any.
        head_dim: 64, 128 or 256.
        kv: "bf16", "fp16" or "fp8".
        block_tokens: tokens per tile.
        stages: Triton's num_stages of the tile loop.
        warps: warps per CTA.
        registers: registers per thread, compiled for SM 9.0.
        smem_bytes: shared memory per CTA, compiled for SM 9.0.
        form: "none", "line" or "bulk".
        distance: tiles ahead that measured best; 0 is off.
        pdl: launch with programmatic dependent launch and prefetch before the wait.
        gain_percent: measured gain of prefetch over none for this row.
        measured: where the figures come from; "" means not measured.
    """

    gpu: str
    group: int
    head_dim: int
    kv: str
    block_tokens: int
    stages: int
    warps: int
    registers: int
    smem_bytes: int
    form: str = "none"
    distance: int = 0
    pdl: bool = False
    gain_percent: float = 0.0
    measured: str = ""

    @property
    def tile_bytes(self) -> int:
        """K and V bytes of one tile."""
        return 2 * self.block_tokens * self.head_dim * KV_BYTES[self.kv]

    @property
    def depth(self) -> int:
        """Tiles that the loop itself keeps in flight: an index and a gather take two stages a tile.

        Source: the Triton pipeliner's TTGIR at 2 to 8 stages.
        """
        return max(1, (self.stages - 1) // 2)

    def ctas_per_sm(self, gpu: Gpu) -> int:
        """Resident CTAs on one SM, from registers, shared memory and threads."""
        threads = 32 * self.warps
        by_registers = 65536 // (-(-self.registers // 8) * 8 * threads)
        by_smem = gpu.smem_per_sm // (self.smem_bytes + 1024)
        return max(1, min(by_registers, by_smem, 2048 // threads))


@dataclass(frozen=True, slots=True)
class Table:
    """GPUs by name and tiles, most specific match first."""

    gpus: Mapping[str, Gpu]
    tiles: tuple[Tile, ...]

    def tile(self, gpu: str, group: int, head_dim: int, kv: str) -> Tile:
        """The best row: exact GPU before any, exact group before any. Raises ConfigError when none fits."""
        fit = [
            t
            for t in self.tiles
            if t.head_dim == head_dim and t.kv == kv and t.gpu in (gpu, "*") and t.group in (group, 0)
        ]
        if not fit:
            raise ConfigError(
                f"no tile for head_dim {head_dim}, KV dtype {kv!r}",
                "l2_prefetch tuning table",
                f"use head_dim {HEAD_DIMS} and one of {tuple(KV_BYTES)}",
            )
        return max(fit, key=lambda t: (t.gpu == gpu, t.group == group))

    def is_measured(self, gpu: str) -> bool:
        """True when any row of this GPU was measured."""
        return any(t.gpu == gpu and t.measured for t in self.tiles)

    def to_json(self) -> str:
        """The text of ``tuning.json``."""
        body = {
            "format": FORMAT,
            "gpus": [asdict(g) for g in self.gpus.values()],
            "tiles": [asdict(t) for t in self.tiles],
        }
        return json.dumps(body, indent=1) + "\n"

    def with_rows(self, gpu: Gpu, rows: list[Tile]) -> Table:
        """This table with the rows of ``gpu`` replaced by ``rows``."""
        kept = tuple(t for t in self.tiles if t.gpu != gpu.name)
        return Table({**self.gpus, gpu.name: gpu}, kept + tuple(replace(r, gpu=gpu.name) for r in rows))


def _build(kind: type, raw: Mapping[str, Any], path: Path) -> Any:
    known = {f.name for f in fields(kind)}
    if set(raw) - known:
        raise ConfigError(f"unknown field {sorted(set(raw) - known)}", str(path), f"known: {sorted(known)}")
    return kind(**raw)


@cache
def load_table(path: Path = PATH) -> Table:
    """Read a table. Raises ConfigError when its format or a field is not known."""
    raw = json.loads(path.read_text())
    if raw.get("format") != FORMAT:
        raise ConfigError(f"format {raw.get('format')!r}", str(path), f"write format {FORMAT}")
    gpus = [_build(Gpu, g, path) for g in raw["gpus"]]
    return Table({g.name: g for g in gpus}, tuple(_build(Tile, t, path) for t in raw["tiles"]))
