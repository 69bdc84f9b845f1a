"""What a decode call takes, and every reason to refuse one before anything is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.kernels.l2_prefetch.planner import Shape
from sglang_hicache_ext.kernels.l2_prefetch.tuning import HEAD_DIMS, PAGE_TOKENS

QUERY_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8_DTYPES = {torch.float8_e4m3fn: 89, torch.float8_e5m2: 80}
"""fp8 dtypes and the compute capability (x 10) that Triton needs to convert them."""
MAX_GROUP = 16
MAX_SLOTS = (1 << 31) - 1
LAYOUTS = ("NHD", "HND")
ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """Numbers of a decode call that are not tensors.

    Attributes:
        sm_scale: multiplies q.k, usually head_dim ** -0.5.
        k_scale, v_scale: what an fp8 pool's values are multiplied by; 1 otherwise.
        window: newest tokens that are attended to; 0 is all.
        soft_cap: logits become cap * tanh(logits / cap); 0 is none.
        page_tokens: tokens per page of the pool: 1, 16 or 64. Token slots in an NHD pool do not depend on it; pass 1.
        layout: "NHD" [slots, KV heads, D] or "HND" [pages, KV heads, page_tokens, D].
    """

    sm_scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0
    window: int = 0
    soft_cap: float = 0.0
    page_tokens: int = 1
    layout: str = "NHD"


@dataclass(frozen=True, slots=True)
class KvIndex:
    """Where each request's tokens are.

    Attributes:
        indptr: [batch + 1] int32, first entry of each request.
        entries: [entries] int32 or int64: token slots, or page numbers when ``seq_lens`` is given.
        seq_lens: [batch] int32 or int64 tokens of each request; makes the entries pages. Never write more
            tokens than the request's entries hold.
    """

    indptr: torch.Tensor
    entries: torch.Tensor
    seq_lens: torch.Tensor | None = None


def fail(what: str, todo: str) -> None:
    raise ConfigError(what, "l2_prefetch decode_attention", todo)


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: KvIndex,
    params: DecodeParams,
    sinks: torch.Tensor | None = None,
) -> Shape:
    """Check shapes, dtypes, strides and values; read no device memory.

    Returns:
        the planner's Shape of the call.

    Raises:
        ConfigError: names the argument, its shape or value, and what is allowed.
    """
    _check_params(params)
    _check_query(q)
    kv = _check_pools(q, k, v, params)
    _check_index(q, index, params)
    if sinks is not None and (sinks.shape != (q.shape[1],) or not sinks.is_floating_point()):
        fail(f"sinks are {sinks.dtype}{tuple(sinks.shape)}", f"pass one float per query head: ({q.shape[1]},)")
    _check_devices(q, k, v, index.indptr, index.entries, index.seq_lens, sinks)
    return Shape(q.shape[1], k.shape[1], q.shape[2], kv, params.page_tokens, params.layout, params.window)


def _check_params(params: DecodeParams) -> None:
    if params.layout not in LAYOUTS:
        fail(f"layout {params.layout!r}", f"use one of {LAYOUTS}")
    if params.page_tokens not in PAGE_TOKENS:
        fail(f"page_tokens {params.page_tokens}", f"use one of {PAGE_TOKENS}")
    if params.window < 0:
        fail(f"window {params.window}", "use 0 for none, or a number of tokens")
    if not (math.isfinite(params.soft_cap) and params.soft_cap >= 0):
        fail(f"soft_cap {params.soft_cap}", "use 0 for none, or a positive number")
    for name in ("sm_scale", "k_scale", "v_scale"):
        if not math.isfinite(getattr(params, name)):
            fail(f"{name} is {getattr(params, name)}", "use a finite number")


def _check_query(q: torch.Tensor) -> None:
    if q.dim() != 3:
        fail(f"q has shape {tuple(q.shape)}", "pass [batch, query heads, head_dim]")
    if q.dtype not in QUERY_DTYPES:
        fail(f"q is {q.dtype}", f"use one of {tuple(QUERY_DTYPES)}")
    if q.shape[2] not in HEAD_DIMS:
        fail(f"head_dim is {q.shape[2]} (q {tuple(q.shape)})", f"use one of {HEAD_DIMS}")
    if q.stride(2) != 1:
        fail(f"q has strides {q.stride()}", "the last dimension must be contiguous")


def _check_pools(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: DecodeParams) -> str:
    allowed = (q.dtype, *FP8_DTYPES)
    shape = "[slots, KV heads, head_dim]" if params.layout == "NHD" else "[pages, KV heads, page_tokens, head_dim]"
    for name, pool in (("k", k), ("v", v)):
        if pool.dtype not in allowed:
            fail(f"{name} pool is {pool.dtype}", f"with {q.dtype} queries use one of {allowed}")
        if pool.dim() != (3 if params.layout == "NHD" else 4):
            fail(f"{name} pool has shape {tuple(pool.shape)}", f"layout {params.layout} is {shape}")
        if pool.shape[-1] != q.shape[2]:
            fail(f"{name} pool has head_dim {pool.shape[-1]}, q has {q.shape[2]}", "they must be equal")
        if params.layout == "HND" and pool.shape[2] != params.page_tokens:
            fail(f"{name} pool has pages of {pool.shape[2]} tokens", f"page_tokens says {params.page_tokens}")
        _check_strides(name, pool, params)
    if k.shape != v.shape or k.dtype != v.dtype:
        fail(f"k pool is {k.dtype}{tuple(k.shape)}, v pool {v.dtype}{tuple(v.shape)}", "they must be alike")
    if params.layout == "NHD" and params.page_tokens > 1 and k.shape[0] % params.page_tokens:
        fail(f"pool of {k.shape[0]} slots", f"page_tokens {params.page_tokens} must divide it")
    if pool_slots(k, params) > MAX_SLOTS:
        fail(f"pool of {pool_slots(k, params)} slots", f"the kernel counts slots in 32 bits: at most {MAX_SLOTS}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads or not 1 <= heads // kv_heads <= MAX_GROUP:
        fail(f"{heads} query heads over {kv_heads} KV heads", f"use a whole group of 1 to {MAX_GROUP} query heads")
    return "fp8" if k.dtype in FP8_DTYPES else QUERY_DTYPES[q.dtype]


def _check_strides(name: str, pool: torch.Tensor, params: DecodeParams) -> None:
    rows = [s * pool.element_size() for s in pool.stride()[:-1]]
    if pool.stride(-1) != 1 or pool.data_ptr() % ALIGN_BYTES or any(s % ALIGN_BYTES or s <= 0 for s in rows):
        fail(
            f"{name} pool is not contiguous enough: shape {tuple(pool.shape)}, strides {pool.stride()}",
            f"each [head_dim] row must be contiguous and start at a multiple of {ALIGN_BYTES} bytes",
        )


def _check_index(q: torch.Tensor, index: KvIndex, params: DecodeParams) -> None:
    integers = (torch.int32, torch.int64)
    if index.indptr.dtype != torch.int32 or index.indptr.dim() != 1 or index.indptr.shape[0] < q.shape[0] + 1:
        fail(
            f"indptr is {index.indptr.dtype}{tuple(index.indptr.shape)}",
            f"pass int32 of at least batch + 1 = {q.shape[0] + 1} entries",
        )
    if index.entries.dtype not in integers or index.entries.dim() != 1:
        fail(f"entries are {index.entries.dtype}{tuple(index.entries.shape)}", f"pass a vector, one of {integers}")
    lens = index.seq_lens
    if lens is not None and (lens.dtype not in integers or lens.dim() != 1 or lens.shape[0] < q.shape[0]):
        fail(f"seq_lens are {lens.dtype}{tuple(lens.shape)}", f"pass a vector of {q.shape[0]}, one of {integers}")
    for name, t in (("indptr", index.indptr), ("entries", index.entries), ("seq_lens", lens)):
        if t is not None and t.numel() > 1 and t.stride(0) != 1:
            fail(f"{name} has stride {t.stride(0)}", "pass a contiguous vector")


def _check_devices(q: torch.Tensor, *others: torch.Tensor | None) -> None:
    for t in others:
        if t is not None and t.device != q.device:
            fail(f"tensors on {q.device} and {t.device}", "put all of them on one device")


def pool_slots(k: torch.Tensor, params: DecodeParams) -> int:
    """Token slots of the pool."""
    return int(k.shape[0]) * (params.page_tokens if params.layout == "HND" else 1)


def check_output(out: torch.Tensor, q: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Outputs may have any strides but the last of ``out``. Raises ConfigError."""
    if out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1 or out.device != q.device:
        fail(f"out is {out.dtype}{tuple(out.shape)}", f"pass {q.dtype}{tuple(q.shape)}, last dimension contiguous")
    if lse is not None and (lse.shape != q.shape[:2] or lse.dtype != torch.float32 or lse.device != q.device):
        fail(f"lse is {lse.dtype}{tuple(lse.shape)}", f"pass torch.float32{tuple(q.shape[:2])}")


def check_entries(k: torch.Tensor, index: KvIndex, params: DecodeParams, batch: int) -> None:
    """Check the index's values on the host; copies the index from the device and synchronises.

    Raises:
        ConfigError: names the first request and entry outside the pool, or an indptr that goes backwards.
    """
    indptr = index.indptr[: batch + 1].cpu().long()
    if len(indptr) and (int(indptr[0]) < 0 or bool((indptr[1:] < indptr[:-1]).any())):
        fail(f"indptr goes backwards: {indptr[:9].tolist()}", "write growing offsets from 0")
    if int(indptr[-1]) > index.entries.shape[0]:
        fail(f"indptr ends at {int(indptr[-1])}", f"entries has {index.entries.shape[0]}")
    limit = pool_slots(k, params)
    if index.seq_lens is not None:
        limit //= params.page_tokens
        held = (indptr[1:] - indptr[:-1]) * params.page_tokens
        over = (index.seq_lens[:batch].cpu().long() > held) | (index.seq_lens[:batch].cpu() < 0)
        if bool(over.any()):
            b = int(over.nonzero()[0])
            fail(f"request {b} has {int(index.seq_lens[b])} tokens", f"its entries hold {int(held[b])}")
    used = index.entries[int(indptr[0]) : int(indptr[-1])].cpu()
    bad = (used < 0) | (used >= limit)
    if bool(bad.any()):
        at = int(bad.nonzero()[0]) + int(indptr[0])
        b = int((indptr <= at).sum()) - 1
        fail(f"entry {at} of request {b} is {int(index.entries[at])}", f"the pool allows 0 to {limit - 1}")
