"""The planner: even splits on every SM count, fixed grids that always suffice, and reasons for the prefetch switch."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.kernels.l2_prefetch import planner
from sglang_hicache_ext.kernels.l2_prefetch.planner import Shape, item_bound, make_plan, split_counts, split_tokens
from sglang_hicache_ext.kernels.l2_prefetch.tuning import KV_BYTES, Gpu, Table, Tile, load_table

SM_COUNTS = (1, 7, 76, 78, 132, 148)
H200 = load_table().gpus["NVIDIA H200"]
MHA = Shape(32, 32, 128, "bf16")
GQA = Shape(32, 8, 128, "bf16")


def measured(gpu: Gpu = H200, **changes: object) -> Table:
    """The shipped table with one measured row for MHA bf16, and so a GPU that has measurements."""
    base = load_table().tile("*", 1, 128, "bf16")
    row = dataclasses.replace(
        base, group=1, form="line", distance=2, gain_percent=4.0, measured="a test", stages=3, block_tokens=16
    )
    return load_table().with_rows(gpu, [dataclasses.replace(row, **changes)])  # type: ignore[arg-type]


@given(
    lengths=st.lists(st.integers(0, 200_000), min_size=1, max_size=64),
    kv_heads=st.sampled_from((1, 2, 4, 8, 32)),
    sms=st.sampled_from(SM_COUNTS),
    block=st.sampled_from((16, 32, 64)),
)
def test_splits_cover_each_request_evenly_and_fit_the_fixed_grid(
    lengths: list[int], kv_heads: int, sms: int, block: int
) -> None:
    counts = split_counts(lengths, kv_heads, sms, block)
    most = split_tokens(sum(lengths), kv_heads, sms, block)
    assert all(c >= 1 for c in counts)
    assert sum(counts) <= item_bound(len(lengths), kv_heads, sms)
    for n, c in zip(lengths, counts, strict=True):
        assert c * most >= n
        assert c == 1 or (c - 1) * most < n
        tiles = -(-n // block)
        assert -(-tiles // c) * block <= most
    even = kv_heads * sum(lengths) / (planner.WAVES * sms)
    assert most <= max(even, planner.MIN_SPLIT_TOKENS) + block + 1


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_one_long_request_fills_every_sm(sms: int, kv_heads: int) -> None:
    counts = split_counts([131072], kv_heads, sms, 32)
    assert counts[0] * kv_heads >= sms
    assert sms < 76 or kv_heads > 4 or counts[0] > 8


@pytest.mark.parametrize("sms", SM_COUNTS)
def test_a_ragged_batch_gives_the_long_request_the_splits(sms: int) -> None:
    counts = split_counts([128, 128, 100_000, 0], 8, sms, 32)
    assert counts[0] == counts[1] == counts[3] == 1
    assert counts[2] >= min(sms // 8, 100_000 // 256)


@pytest.mark.parametrize(("sms", "kv_heads"), list(itertools.product(SM_COUNTS, (1, 8))))
def test_an_empty_batch_and_empty_requests_plan(sms: int, kv_heads: int) -> None:
    assert split_counts([], kv_heads, sms, 32) == ()
    assert split_counts([0, 0], kv_heads, sms, 32) == (1, 1)


def test_every_shape_that_ships_has_a_tile_and_no_row_claims_a_measurement() -> None:
    for group, dim, kv in itertools.product(range(1, 17), (64, 128, 256), KV_BYTES):
        tile = load_table().tile("any", group, dim, kv)
        assert 32 * tile.warps >= 2 * tile.block_tokens
        assert not tile.measured and not tile.distance and tile.form == "none"


@pytest.mark.parametrize("gpu", list(load_table().gpus.values()), ids=lambda g: g.name)
@pytest.mark.parametrize("shape", [MHA, GQA])
def test_prefetch_is_off_by_default_on_every_gpu_of_the_shipped_table(gpu: Gpu, shape: Shape) -> None:
    plan = make_plan(gpu, shape, [32768] * 16)
    assert (plan.prefetch.form, plan.prefetch.distance) == ("none", 0)
    assert any("no measurements" in w or "below 9.0" in w for w in plan.why)


def test_a_measured_gain_switches_prefetch_on() -> None:
    plan = make_plan(H200, MHA, [32768] * 16, table=measured())
    assert plan.prefetch.form == "line" and plan.prefetch.distance == 2
    assert any("2 tiles ahead" in w for w in plan.why)


@pytest.mark.parametrize(
    ("gpu", "shape", "lengths", "table", "reason"),
    [
        (dataclasses.replace(H200, sm=80), MHA, [32768] * 16, measured(), "below 9.0"),
        (H200, Shape(28, 4, 128, "bf16"), [32768] * 16, measured(group=7), "7 query heads"),
        (dataclasses.replace(H200, name="other"), MHA, [32768] * 16, measured(), "no measurements"),
        (H200, MHA, [32], measured(), "2 tiles a split or fewer"),
        (dataclasses.replace(H200, l2_bytes=4 << 20), MHA, [32768] * 16, measured(), "exceed 25% of"),
        (H200, GQA, [32768] * 16, measured(), "already in flight"),
        (H200, MHA, [32768] * 16, measured(distance=0, form="none"), "no gain"),
    ],
    ids=["sm", "group", "unmeasured", "tiles", "l2", "in-flight", "measured-off"],
)
def test_each_rule_switches_prefetch_off_and_says_why(
    gpu: Gpu, shape: Shape, lengths: list[int], table: Table, reason: str
) -> None:
    plan = make_plan(gpu, shape, lengths, table=table)
    assert plan.prefetch.distance == 0
    assert any(reason in w for w in plan.why), plan.why


def test_on_overrides_measurement_group_and_sm_but_not_the_l2_share() -> None:
    a100 = load_table().gpus["NVIDIA A100-SXM4-80GB"]
    small = dataclasses.replace(load_table().tile("*", 0, 128, "bf16"), stages=3, block_tokens=16)
    table = Table(load_table().gpus, (small,))
    plan = make_plan(a100, Shape(28, 4, 128, "bf16", 16, "HND"), [32768] * 16, "on", table)
    assert plan.prefetch.distance > 0 and plan.prefetch.form == "line"
    tiny = dataclasses.replace(a100, l2_bytes=1 << 20)
    assert make_plan(tiny, MHA, [32768] * 16, "on", table).prefetch.distance == 0
    assert make_plan(a100, MHA, [32768] * 16, "off", measured()).prefetch.form == "none"


@given(
    distance=st.integers(1, 64),
    block=st.sampled_from((16, 32, 64)),
    l2=st.integers(1 << 20, 256 << 20),
    sms=st.sampled_from(SM_COUNTS),
)
def test_prefetched_bytes_never_exceed_the_l2_share(distance: int, block: int, l2: int, sms: int) -> None:
    gpu = dataclasses.replace(H200, l2_bytes=l2, sms=sms)
    table = measured(gpu, distance=distance, block_tokens=block)
    plan = make_plan(gpu, MHA, [65536] * 8, table=table)
    held = plan.prefetch.distance * plan.tile.tile_bytes * planner.resident_ctas(gpu, MHA, plan.tile, 8)
    assert held <= planner.L2_SHARE * l2
    assert not plan.prefetch.distance or plan.tile.depth < plan.prefetch.distance <= distance


def test_hnd_pages_are_prefetched_in_bulk_and_rows_in_lines() -> None:
    table = Table({}, (dataclasses.replace(load_table().tile("*", 0, 128, "bf16"), stages=3, block_tokens=16),))
    for layout, page, form in (("HND", 16, "bulk"), ("HND", 64, "bulk"), ("NHD", 64, "line"), ("HND", 1, "line")):
        shape = Shape(8, 8, 128, "bf16", page, layout)
        assert make_plan(H200, shape, [65536] * 8, "on", table).prefetch.form == form


def test_a_window_limits_the_work_that_is_planned() -> None:
    assert make_plan(H200, dataclasses.replace(GQA, window=1024), [100_000]).splits == (4,)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: make_plan(H200, MHA, [-1]), "negative length"),
        (lambda: make_plan(H200, MHA, [1], "maybe"), "off, auto, on"),
        (lambda: make_plan(H200, dataclasses.replace(MHA, head_dim=96), [1]), r"\(64, 128, 256\)"),
        (lambda: Shape(7, 2, 128, "bf16"), "7 query heads do not divide by 2"),
    ],
)
def test_bad_input_is_refused(call: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()  # type: ignore[operator]


def test_a_table_survives_its_file_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(measured().to_json())
    assert load_table(path) == measured()
    path2 = tmp_path / "u.json"
    path2.write_text(measured().to_json().replace('"warps"', '"wraps"'))
    with pytest.raises(ConfigError, match="wraps"):
        load_table(path2)


def test_planning_needs_neither_torch_nor_triton() -> None:
    code = (
        "import sys; import sglang_hicache_ext.kernels.l2_prefetch.planner as p;"
        "p.make_plan(p.load_table().gpus['NVIDIA H200'], p.Shape(32, 8, 128, 'bf16'), [4096]);"
        "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tile_resources_bound_the_resident_ctas() -> None:
    tile = Tile("*", 0, 128, "bf16", 64, 3, 4, 128, 39936)
    assert tile.ctas_per_sm(H200) == 4
    assert dataclasses.replace(tile, smem_bytes=110 << 10).ctas_per_sm(H200) == 2
