"""SGLang's own ForwardMetadata, RadixAttention and forward_decode, with our kernel interpreted on CPU tensors.

The backend object is made without its constructor, which wants a model runner; what it would have set is set here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.kernels.l2_prefetch.check import DecodeParams, KvIndex
from sglang_hicache_ext.kernels.l2_prefetch.planner import item_bound
from sglang_hicache_ext.kernels.l2_prefetch.reference import reference
from sglang_hicache_ext.sglang_adapter.attention import Layer

pytestmark = pytest.mark.timeout(300)  # the first test imports SGLang

SITE = str(Path(__file__).resolve().parents[2] / "sglang_cpu" / "site")
HEADS, KV_HEADS, DIM, SLOTS, WINDOW = 4, 2, 64, 512, 48
LENGTHS = [70, 1, 130]


@pytest.fixture(scope="module")
def sg() -> Any:
    pytest.importorskip("sglang")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if SITE not in sys.path:
            sys.path.append(SITE)
        import cpu_kit

        cpu_kit.stand_in_for_torchvision()
        from sglang.srt.layers.attention import triton_backend
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        from sglang_hicache_ext.sglang_adapter import attention_backend
    return SimpleNamespace(
        triton=triton_backend, RadixAttention=RadixAttention, Mode=ForwardMode, ours=attention_backend
    )


def make_backend(sg: Any, kv_dtype: torch.dtype = torch.bfloat16, mode: str = "auto") -> Any:
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randn(SLOTS, KV_HEADS, DIM, generator=g).to(kv_dtype) for _ in "kv")
    backend = object.__new__(sg.ours.L2PrefetchAttnBackend)
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda _: k, get_value_buffer=lambda _: v)
    backend.use_mla = backend.is_draft_runner = backend.enable_deterministic = False
    backend.enable_lean_attention = backend.use_pdl = False
    backend.dcp_size, backend.page_size, backend.swa_v_head_dim, backend.max_kv_splits = 1, 16, None, 1
    kv = "bf16" if kv_dtype is torch.bfloat16 else "fp8"
    for name, windowed in (("full", False), ("window", True)):
        layer = Layer(HEADS, KV_HEADS, DIM, DIM, windowed=windowed)
        setattr(backend, f"_{name}_rail", backend._rail(name, [layer], kv, mode, torch.device("cpu")))
    backend.decode_attention_fwd = backend._decode
    indptr = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    slots = torch.randperm(SLOTS, generator=g)[: sum(LENGTHS)]
    tails = [slots[int(b) - min(n, WINDOW) : int(b)] for b, n in zip(indptr[1:], LENGTHS, strict=True)]
    window_indptr = torch.tensor([0] + [len(t) for t in tails]).cumsum(0).int()
    nothing = torch.empty(0)
    fields = dict.fromkeys(
        ("max_extend_len", "qo_indptr", "custom_mask", "mask_indptr", "window_num_kv_splits", "window_kv_offsets")
    )
    backend.forward_metadata = sg.triton.ForwardMetadata(
        attn_logits=nothing,
        attn_lse=nothing,
        num_kv_splits=nothing,
        kv_indptr=indptr,
        kv_indices=slots,
        window_kv_indptr=window_indptr,
        window_kv_indices=torch.cat(tails),
        **fields,
    )
    return backend


def layer_of(sg: Any, windowed: bool = False, cap: float = 0.0) -> Any:
    window = WINDOW - 1 if windowed else -1
    return sg.RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, logit_cap=cap, sliding_window_size=window)


def batch_of(sg: Any) -> Any:
    return SimpleNamespace(
        batch_size=len(LENGTHS), forward_mode=sg.Mode.DECODE, spec_info=None, seq_lens_sum=sum(LENGTHS)
    )


def decode(backend: Any, layer: Any, batch: Any, sinks: torch.Tensor | None = None, **extra: Any) -> tuple[Any, Any]:
    q = torch.randn(len(LENGTHS), HEADS * DIM, generator=torch.Generator().manual_seed(2)).bfloat16()
    return q, backend.forward_decode(q, None, None, layer, batch, save_kv_cache=False, sinks=sinks, **extra)


def expect(backend: Any, q: torch.Tensor, windowed: bool, params: DecodeParams, sinks: Any = None) -> torch.Tensor:
    data, pool = backend.forward_metadata, backend.token_to_kv_pool
    index = KvIndex(data.kv_indptr, data.kv_indices)
    if windowed:
        index = KvIndex(data.window_kv_indptr, data.window_kv_indices)
    q3 = q.view(-1, HEADS, DIM)
    out, _ = reference(q3, pool.get_key_buffer(0), pool.get_value_buffer(0), index, params, sinks)
    return out.view(len(LENGTHS), -1)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_forward_decode_of_both_rails_eager_and_in_graph_buffers_is_right(sg: Any, windowed: bool, graph: bool) -> None:
    backend, batch = make_backend(sg), batch_of(sg)
    if graph:
        for rail in (backend._full_rail, backend._window_rail):
            rail.reserve_graph(8)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend._schedule(batch, in_graph=False)
    sinks = torch.randn(HEADS)
    q, out = decode(backend, layer_of(sg, windowed, 30.0), batch, sinks)
    want = expect(backend, q, windowed, DecodeParams(DIM**-0.5, soft_cap=30.0), sinks)
    assert float((out.double() - want).norm() / want.norm()) < 6e-3


def test_fp8_pool_with_scales_is_dequantized(sg: Any) -> None:
    backend, batch, layer = make_backend(sg, torch.float8_e4m3fn), batch_of(sg), layer_of(sg)
    layer.k_scale = layer.v_scale = torch.ones(1)
    layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    backend._schedule(batch, in_graph=False)
    q, out = decode(backend, layer, batch)
    want = expect(backend, q, False, DecodeParams(DIM**-0.5, 0.5, 2.0))
    assert float((out.double() - want).norm() / want.norm()) < 6e-3


def test_graph_buffers_keep_their_addresses_and_refill_for_new_lengths(sg: Any) -> None:
    backend, batch = make_backend(sg), batch_of(sg)
    rail = backend._full_rail
    rail.reserve_graph(8)
    backend._window_rail = None
    backend.init_forward_metadata_in_graph(batch)
    first, workspace = rail.current()
    assert first.items == item_bound(len(LENGTHS), KV_HEADS, 1)
    backend.forward_metadata.kv_indptr.copy_(torch.tensor([0, 1, 1, 500], dtype=torch.int32))
    backend.init_forward_metadata_in_graph(batch)
    second, again = rail.current()
    assert first.split_indptr.data_ptr() == second.split_indptr.data_ptr()
    assert first.item_request.data_ptr() == second.item_request.data_ptr()
    assert first.distance.data_ptr() == second.distance.data_ptr() and workspace is again
    assert second.split_indptr.tolist() == [0, 1, 2, 3]
    with pytest.raises(CapabilityError, match="batch 9 exceeds"):
        rail.fill(9, torch.zeros(10, dtype=torch.int32), True)


def test_extend_batches_and_empty_batches_plan_nothing(sg: Any) -> None:
    backend, batch = make_backend(sg), batch_of(sg)
    batch.forward_mode = sg.Mode.EXTEND
    backend._schedule(batch, in_graph=False)
    batch.forward_mode, batch.batch_size = sg.Mode.IDLE, 0
    backend._schedule(batch, in_graph=False)
    with pytest.raises(CapabilityError, match="before any metadata"):
        backend._full_rail.current()


def test_score_mod_is_refused_by_name(sg: Any) -> None:
    backend, batch = make_backend(sg), batch_of(sg)
    backend._schedule(batch, in_graph=False)
    with pytest.raises(CapabilityError, match="score_mod"):
        decode(backend, layer_of(sg), batch, score_mod=lambda x: x)


def test_the_distinct_layers_of_a_model_are_found(sg: Any) -> None:
    model = torch.nn.ModuleList([layer_of(sg), layer_of(sg), layer_of(sg, windowed=True)])
    found = sg.ours.attention_layers(model)
    assert [x.windowed for x in found] == [False, True]
    assert (found[0].query_heads, found[0].kv_heads, found[0].qk_dim, found[0].kind) == (4, 2, 64, "decoder")
