"""Compile the kernel without a GPU and read what came out: instructions, registers, spills, layout.

Used by the tests, by the benchmark (registers of a new tile) and by anybody who changes the kernel:

    python -m sglang_hicache_ext.kernels.l2_prefetch.aot
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_hicache_ext.kernels.l2_prefetch import kernel
from sglang_hicache_ext.kernels.l2_prefetch.attention import COMBINE_STEP, FORM_CODES
from sglang_hicache_ext.kernels.l2_prefetch.registers import first_fit
from sglang_hicache_ext.kernels.l2_prefetch.tuning import KV_BYTES, Table, Tile, load_table

TRITON_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8e4nv", "fp8e5": "fp8e5"}
_INT_STRIDES = ("q_", "k_", "v_", "out_", "lse_", "part_")


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialization of ``attend``: a tile and what the call and the prefetch switch add."""

    tile: Tile
    form: str = "none"
    group: int = 1
    page_tokens: int = 1
    hnd: bool = False
    page_index: bool = False
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    pdl: bool = False
    query: str = "bf16"
    kv: str = ""

    def constants(self) -> dict[str, Any]:
        return {
            "GROUP": self.group,
            "D": self.tile.head_dim,
            "N": self.tile.block_tokens,
            "PAGE": self.page_tokens,
            "ITEMSIZE": KV_BYTES[self.tile.kv],
            "PAGE_INDEX": self.page_index,
            "HND": self.hnd,
            "WINDOW": self.window,
            "SOFT_CAP": self.soft_cap,
            "SINKS": self.sinks,
            "WITH_LSE": False,
            "FORM": FORM_CODES[self.form],
            "PDL": self.pdl,
            "LANES": 32 * self.tile.warps,
            "STAGES": self.tile.stages,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler made of a variant.

    Attributes:
        registers: per thread.
        spill_bytes: local memory and stack per thread; 0 is required.
        smem_bytes: per CTA.
        counts: occurrences by name: PTX ("ptx_line", "ptx_bulk", "cp_async", "mma", "gdc_wait") and SASS
            ("CCTL", "UBLKPF", "LDGSTS", "LDL", "ACQBULK").
        asm_layouts: the layout line of every inline-assembly operation with tensor operands.
        sass: the disassembly.
    """

    registers: int
    spill_bytes: int
    smem_bytes: int
    counts: dict[str, int]
    asm_layouts: tuple[str, ...]
    sass: str

    def summary(self) -> dict[str, Any]:
        body = asdict(self)
        del body["sass"], body["asm_layouts"]
        return body


def _signature(function: Any, constants: dict[str, Any], pointers: dict[str, str]) -> tuple[dict[str, str], Any]:
    signature, attributes = {}, {}
    for position, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "fp32" if name in ("scale", "v_scale") else "i32")
        if name in pointers or (name.startswith(_INT_STRIDES) and name != "v_scale"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, attributes


def _compile(
    function: Any, constants: dict[str, Any], pointers: dict[str, str], sm: int, warps: int, stages: int,
    register_limit: int | None = None,
) -> Any:  # fmt: skip
    signature, attributes = _signature(function, constants, pointers)
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, "maxnreg": register_limit}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def compile_attend(variant: Variant, sm: int) -> Report:
    """Compile ``attend`` for an SM version (80, 90, 100), with the register limit that a launch would find."""
    q = TRITON_DTYPES[variant.query]
    kv = TRITON_DTYPES[variant.kv or variant.tile.kv]
    ints = ("indptr", "seq_lens", "split_indptr", "item_request", "distance_at")
    floats = ("lse", "partial", "partial_lse", "sinks")
    pointers = {"q": f"*{q}", "out": f"*{q}", "k": f"*{kv}", "v": f"*{kv}", "entries": "*i64"}
    pointers |= dict.fromkeys(ints, "*i32") | dict.fromkeys(floats, "*fp32")
    tile = variant.tile

    def build(limit: int | None) -> tuple[Report, int, int]:
        compiled = _compile(kernel.attend, variant.constants(), pointers, sm, tile.warps, tile.stages, limit)
        report = _report(compiled)
        return report, report.registers, report.spill_bytes

    report: Report = first_fit(tile, build)[1]
    return report


def compile_combine(head_dim: int, sm: int, pdl: bool = False) -> Report:
    """Compile ``combine`` for an SM version."""
    constants = {"D": head_dim, "STEP": COMBINE_STEP, "SINKS": True, "WITH_LSE": True, "PDL": pdl}
    pointers = {"out": "*bf16", "split_indptr": "*i32"}
    pointers |= dict.fromkeys(("lse", "partial", "partial_lse", "sinks"), "*fp32")
    return _report(_compile(kernel.combine, constants, pointers, sm, 4, 1))


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _report(compiled: Any) -> Report:
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = [_tool("cuobjdump"), "--dump-resource-usage", "--dump-sass", file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text[:300]}")
    patterns = {"ptx_line": r"prefetch\.global\.L2 ", "ptx_bulk": r"cp\.async\.bulk\.prefetch\.L2"}
    patterns |= {"cp_async": r"cp\.async\.c[ag]", "mma": r"mma\.sync", "gdc_wait": r"griddepcontrol\.wait"}
    counts = {k: len(re.findall(p, ptx)) for k, p in patterns.items()}
    counts |= {k: len(re.findall(rf"\b{k}\b", text)) for k in ("CCTL", "UBLKPF", "LDGSTS", "LDL", "STL", "ACQBULK")}
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S+<.*>)$", ttgir, re.M))
    used = re.findall(r"elementwise_inline_asm.*?: tensor<(\d+)xi64, (#\w+)>", ttgir)
    return Report(
        registers=int(usage[1]),
        spill_bytes=int(usage[2]) + int(usage[3]),
        smem_bytes=int(compiled.metadata.shared),
        counts=counts,
        asm_layouts=tuple(f"{n} {layouts.get(name, name)}" for n, name in used),
        sass=text,
    )


def _query(tile: Tile) -> str:
    return "fp16" if tile.kv == "fp16" else "bf16"


@cache
def with_resources(tile: Tile, sm: int = 90) -> Tile:
    """``tile`` with registers and shared memory of its heaviest form (none or line) filled in."""
    reports = [compile_attend(Variant(tile, form, query=_query(tile)), sm) for form in ("none", "line")]
    return replace(tile, registers=max(r.registers for r in reports), smem_bytes=max(r.smem_bytes for r in reports))


def main() -> None:
    """Print one JSON line per tile of the shipped table."""
    table: Table = load_table()
    for tile in table.tiles:
        for form in ("none", "line"):
            report = compile_attend(Variant(tile, form, query=_query(tile)), 90)
            print(json.dumps({"tile": [tile.head_dim, tile.kv, tile.block_tokens], "form": form} | report.summary()))


if __name__ == "__main__":
    main()
