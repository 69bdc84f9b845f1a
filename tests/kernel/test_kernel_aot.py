"""The kernel compiled for three GPU generations without a GPU: instructions, registers, spills, assembly layout."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

from sglang_hicache_ext.kernels.l2_prefetch.aot import Report, Variant, compile_attend, compile_combine
from sglang_hicache_ext.kernels.l2_prefetch.tuning import KV_BYTES, Tile, load_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.timeout(300),
]

TILES = {(t.head_dim, t.kv): t for t in load_table().tiles}
PER_THREAD = "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>"
BF16, FP8, WIDE, NARROW = TILES[128, "bf16"], TILES[128, "fp8"], TILES[256, "bf16"], TILES[64, "bf16"]
HND = {"hnd": True, "page_index": True}

SAMPLE: list[tuple[int, Variant]] = [
    (90, Variant(BF16)),
    (90, Variant(BF16, "line")),
    (90, Variant(BF16, "line", group=4, pdl=True)),
    (90, Variant(BF16, "bulk", page_tokens=64, **HND)),
    (90, Variant(BF16, "bulk", page_tokens=16, group=4, **HND)),
    (90, Variant(FP8, "line", group=4)),
    (90, Variant(WIDE, "line")),
    (90, Variant(NARROW, "line", group=16, page_tokens=16, page_index=True, window=4096, soft_cap=30.0, sinks=True)),
    (80, Variant(BF16, "line")),
    (80, Variant(BF16, "line", group=7, window=4096, sinks=True)),
    (80, Variant(TILES[128, "fp8"], "none", kv="fp8e5")),
    (100, Variant(BF16, "line", group=4)),
    (100, Variant(BF16, "bulk", page_tokens=64, pdl=True, **HND)),
]


def full_matrix() -> list[tuple[int, Variant]]:
    pools: list[dict[str, Any]] = [{}, {"page_tokens": 16, "page_index": True}, {"page_tokens": 64, **HND}]
    extras: list[dict[str, Any]] = [{}, {"window": 4096, "sinks": True}, {"soft_cap": 30.0}]
    out = []
    for sm in (80, 90, 100):
        for tile in load_table().tiles:
            for form in ("none", "line", "bulk"):
                for pool in pools:
                    for extra in extras:
                        for group in (1, 4, 7, 16):
                            if form == "bulk" and (sm < 90 or not pool.get("hnd")):
                                continue
                            kv = "fp8e5" if tile.kv == "fp8" and sm == 80 else ""
                            query = "fp16" if tile.kv == "fp16" else "bf16"
                            pdl = sm >= 90 and group == 4
                            out.append((sm, Variant(tile, form, group, kv=kv, query=query, pdl=pdl, **pool, **extra)))
    return out


def check(sm: int, variant: Variant) -> None:
    report = compile_attend(variant, sm)
    counts, tile = report.counts, variant.tile
    assert report.spill_bytes == 0 and counts["LDL"] == counts["STL"] == 0, report.summary()
    if tile.head_dim == 128 and tile.kv in ("bf16", "fp16"):
        assert report.registers <= 128, report.summary()
    assert counts["mma"] > 0
    assert (counts["cp_async"] > 0) == (tile.stages > 1)
    check_prefetch(variant, report)
    check_pdl(variant, report)


def check_prefetch(variant: Variant, report: Report) -> None:
    """One call site in the loop and one or more (unrolled) before it; one element per thread; nothing when off."""
    counts = report.counts
    sites = {"line": counts["ptx_line"], "bulk": counts["ptx_bulk"]}
    for form, found in sites.items():
        assert (found >= 2) == (form == variant.form), sites
    assert (counts["CCTL"] > 0) == (variant.form == "line")
    assert (counts["UBLKPF"] > 0) == (variant.form == "bulk")
    if variant.form == "none":
        assert not report.asm_layouts
    else:
        assert set(report.asm_layouts) == {f"{32 * variant.tile.warps} {PER_THREAD}"}, report.asm_layouts


def check_pdl(variant: Variant, report: Report) -> None:
    """The prologue's prefetches stand before the wait, the query's load and the loop's prefetch after it."""
    assert report.counts["gdc_wait"] == (2 if variant.pdl else 0)
    if not variant.pdl or variant.form == "none":
        return
    order = re.findall(r"\b(CCTL\.E\.PF2|UBLKPF|ACQBULK|LDGSTS|HMMA)\b", report.sass)
    wait = len(order) - 1 - order[::-1].index("ACQBULK")
    assert {"CCTL.E.PF2", "UBLKPF"} & set(order[:wait])
    assert "LDGSTS" not in order[:wait] and "HMMA" not in order[:wait]


@pytest.mark.parametrize(("sm", "variant"), SAMPLE, ids=[f"sm{s}-{i}-{v.form}" for i, (s, v) in enumerate(SAMPLE)])
def test_a_shipped_specialization_compiles_to_what_we_mean(sm: int, variant: Variant) -> None:
    check(sm, variant)


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("tile", load_table().tiles, ids=lambda tile: f"{tile.head_dim}-{tile.kv}")
@pytest.mark.parametrize("only", [80, 90, 100])
def test_every_shipped_specialization_compiles_to_what_we_mean(only: int, tile: Tile) -> None:
    for sm, variant in full_matrix():
        if sm != only or variant.tile != tile:
            continue
        try:
            check(sm, variant)
        except AssertionError as failed:
            raise AssertionError(f"SM {sm}: {variant}") from failed


@pytest.mark.parametrize("tile", [BF16, FP8], ids=["bf16", "fp8"])
def test_the_table_states_the_compiled_registers_and_shared_memory(tile: Tile) -> None:
    reports = [compile_attend(Variant(tile, form), 90) for form in ("none", "line")]
    assert max(r.registers for r in reports) == pytest.approx(tile.registers, abs=8)
    assert max(r.smem_bytes for r in reports) == tile.smem_bytes


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_combine_kernel_does_not_spill(head_dim: int) -> None:
    report = compile_combine(head_dim, 90)
    assert report.spill_bytes == 0 and report.registers <= 128


def test_the_sample_holds_every_dtype_form_and_head_dim() -> None:
    assert {v.form for _, v in SAMPLE} == {"none", "line", "bulk"}
    assert {v.tile.head_dim for _, v in SAMPLE} == {64, 128, 256}
    assert {sm for sm, _ in SAMPLE} == {80, 90, 100}
    assert set(KV_BYTES) >= {v.tile.kv for _, v in SAMPLE}
