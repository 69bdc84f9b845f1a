"""On a GPU: the same cases as under the interpreter, CUDA graphs that adapt, and repeats without a single NaN."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_hicache_ext.kernels.l2_prefetch import attention
from sglang_hicache_ext.kernels.l2_prefetch.attention import alloc_workspace, decode_attention, device_gpu
from sglang_hicache_ext.kernels.l2_prefetch.check import DecodeParams, KvIndex
from sglang_hicache_ext.kernels.l2_prefetch.planner import Plan, Prefetch, item_bound
from sglang_hicache_ext.kernels.l2_prefetch.reference import reference
from sglang_hicache_ext.kernels.l2_prefetch.schedule import alloc_schedule, fill_schedule, schedule_from_counts
from sglang_hicache_ext.kernels.l2_prefetch.tuning import load_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

_path = Path(__file__).with_name("interpreted") / "kernel_cases.py"
_spec = importlib.util.spec_from_file_location("kernel_cases", _path)
assert _spec is not None and _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
sys.modules["kernel_cases"] = cases
_spec.loader.exec_module(cases)


def supported(case: Any) -> bool:
    """What this GPU can run: bulk prefetch and PDL from SM 9.0, e4m3 from 8.9."""
    sm = device_gpu(torch.device("cuda")).sm
    return (sm >= 90 or (case.prefetch[0] != "bulk" and not case.pdl)) and (
        sm >= 89 or case.kv is not torch.float8_e4m3fn
    )


def on_gpu(t: Any) -> Any:
    """The tensors of a case on the GPU, strides kept."""

    def move(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        base = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype)
        base.untyped_storage().copy_(x.untyped_storage())
        return base.cuda().as_strided(x.shape, x.stride(), x.storage_offset())

    index = KvIndex(*(move(x) for x in (t.index.indptr, t.index.entries, t.index.seq_lens)))  # type: ignore[arg-type]
    return cases.Tensors(move(t.q), move(t.k), move(t.v), index, move(t.sinks), move(t.out), move(t.lse), t.guards)


def run(case: Any, t: Any) -> None:
    kv = "fp8" if case.kv else {torch.float16: "fp16", torch.bfloat16: "bf16"}[case.query]
    tile = load_table().tile("*", case.group, case.head_dim, kv)
    form, distance = case.prefetch
    decode_attention(
        t.q,
        t.k,
        t.v,
        t.index,
        case.params,
        sinks=t.sinks,
        plan=Plan(tile, case.splits, Prefetch(form, distance, case.pdl, ()), ()),
        schedule=schedule_from_counts(case.splits, distance, "cuda"),
        out=t.out,
        lse=t.lse,
    )


@pytest.fixture(autouse=True)
def no_launch_falls_back(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(attention, "_failed", set())
    yield
    assert attention.launch_failures() == 0


COVER = cases.covering_cases()


@pytest.mark.parametrize("case", COVER, ids=[f"{i:03d}" for i in range(len(COVER))])
def test_output_and_lse_are_right_on_the_gpu(case: Any) -> None:
    if not supported(case):
        pytest.skip("not on this compute capability")
    host = cases.make_tensors(case, seed=case.group)
    want, want_lse = reference(host.q, host.k, host.v, host.index, case.params, host.sinks)
    t = on_gpu(host)
    run(case, t)
    assert not t.out.isnan().any()
    norm = want.norm()
    got = (t.out.cpu().double() - want).norm()
    assert float(got / norm if norm else got) < case.tolerance
    live = want_lse.isfinite()
    assert torch.equal(t.lse.cpu().isneginf(), ~live)
    if live.any():
        assert float((t.lse.cpu()[live].double() - want_lse[live]).abs().max()) < 20 * case.tolerance


def batch_of(lengths: list[int], heads: int = 32, kv_heads: int = 8, dim: int = 128) -> Any:
    g = torch.Generator(device="cuda").manual_seed(3)
    slots = sum(lengths) + 64
    make: Any = {"device": "cuda", "dtype": torch.bfloat16, "generator": g}
    q = torch.randn(len(lengths), heads, dim, **make)
    k, v = (torch.randn(slots, kv_heads, dim, **make) for _ in "kv")
    indptr = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    order = torch.randperm(slots, device="cuda", generator=g)
    return q, k, v, KvIndex(indptr, order), DecodeParams(dim**-0.5)


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16, 32])
def test_two_thousand_steps_are_bit_identical_and_finite(splits: int) -> None:
    q, k, v, index, params = batch_of([777, 4096, 1])
    tile = load_table().tile("*", 4, 128, "bf16")
    plan = Plan(tile, (splits,) * 3, Prefetch("none", 0, False, ()), ())
    first = decode_attention(q, k, v, index, params, plan=plan)
    wrong = torch.zeros(1, device="cuda", dtype=torch.int64)
    for _ in range(2000):
        wrong += (decode_attention(q, k, v, index, params, plan=plan) != first).sum()
    assert int(wrong) == 0 and bool(first.isfinite().all())


@pytest.mark.parametrize("form", ["line"])
@pytest.mark.parametrize("pdl", [False, True])
def test_prefetch_on_and_off_give_the_same_bits_on_the_gpu(form: str, pdl: bool) -> None:
    if pdl and device_gpu(torch.device("cuda")).sm < 90:
        pytest.skip("PDL needs SM 9.0")
    q, k, v, index, params = batch_of([8192, 300, 5000])
    tile = load_table().tile("*", 4, 128, "bf16")
    outs = []
    for prefetch in (Prefetch("none", 0, False, ()), Prefetch(form, 0, pdl, ()), Prefetch(form, 4, pdl, ())):
        plan = Plan(tile, (9, 1, 6), prefetch, ())
        outs.append(decode_attention(q, k, v, index, params, plan=plan))
    assert all(torch.equal(o, outs[0]) for o in outs)


def test_one_cuda_graph_serves_other_lengths_and_another_distance() -> None:
    lengths = [4000, 4000, 4000]
    q, k, v, index, params = batch_of(lengths)
    gpu = device_gpu(torch.device("cuda"))
    tile = load_table().tile(gpu.name, 4, 128, "bf16")
    schedule = alloc_schedule(3, 8, gpu.sms, "cuda").prefix(3, item_bound(3, 8, gpu.sms))
    work = alloc_workspace(schedule.items, 32, 128, "cuda")
    out = torch.empty_like(q)
    plan = Plan(tile, (), Prefetch("line", 2, False, ()), ())

    def step() -> None:
        fill_schedule(schedule, kv_heads=8, sms=gpu.sms, tile=tile, distance=2, indptr=index.indptr)
        decode_attention(q, k, v, index, params, plan=plan, schedule=schedule, out=out, workspace=work)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new in ([12000, 0, 0], [1, 70, 9000], [64, 64, 64]):
        index.indptr.copy_(torch.tensor([0, *new], device="cuda").cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        on_host = KvIndex(index.indptr.cpu(), index.entries.cpu())
        want, _ = reference(q.cpu()[:, :4], k.cpu()[:, :1], v.cpu()[:, :1], on_host, params)
        got = out[:, :4].cpu().double()
        assert float((got - want).norm() / want.norm()) < 6e-3
        assert int(schedule.split_indptr[-1]) >= 3
    assert int(schedule.distance) == 0
