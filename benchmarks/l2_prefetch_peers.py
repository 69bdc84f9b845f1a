"""Other decode kernels on the same inputs: each ``PEERS`` entry returns a callable, or a reason why it cannot run.

SGLang's Triton kernel and FlashInfer read the same pages. SDPA and cuDNN have no paged form in torch, so they
read a dense copy of the same K and V: the same bytes in a friendlier order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def sglang_triton(q: Any, k: Any, v: Any, indptr: Any, slots: Any, lengths: list[int]) -> Callable[[], Any] | str:
    """SGLang's decode kernel with its own split heuristic and its default cap of 8 splits."""
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not installed"
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    batch, heads, dim = q.shape
    cap, sms = 8, torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = torch.empty(batch, dtype=torch.int32, device=q.device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    rows = max(256, 1 << (batch - 1).bit_length())
    get_num_kv_splits_triton[(1,)](splits, lens, batch, 1, heads, k.shape[1], cap, sms, MAX_NUM_SEQ=rows)
    logits = torch.empty(batch, heads, cap, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, cap, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)

    def run() -> Any:
        decode_attention_fwd(q, k, v, out, indptr, slots, logits, lse, splits, cap, dim**-0.5, 1.0, 1.0)
        return out

    return run


def flashinfer(q: Any, k: Any, v: Any, indptr: Any, slots: Any, lengths: list[int]) -> Callable[[], Any] | str:
    """FlashInfer's batch decode wrapper at page size 1, tensor cores for groups."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    heads, dim, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    work = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(work, "NHD", use_tensor_cores=heads // kv_heads >= 4)
    last = torch.ones(len(lengths), dtype=torch.int32, device=q.device)
    wrapper.plan(indptr, slots.int(), last, heads, kv_heads, dim, 1, q_data_type=q.dtype, kv_data_type=k.dtype)
    pages = (k.unsqueeze(1), v.unsqueeze(1))
    return lambda: wrapper.run(q, pages)


def _dense(q: Any, k: Any, v: Any, slots: Any, lengths: list[int], backend: Any) -> Callable[[], Any] | str:
    if len(set(lengths)) != 1:
        return "needs equal lengths"
    from torch.nn.attention import sdpa_kernel

    shape = (len(lengths), lengths[0], k.shape[1], k.shape[2])
    keys, values = (t[slots].view(shape).transpose(1, 2) for t in (k, v))
    query = q.unsqueeze(2)

    def run() -> Any:
        with sdpa_kernel(backend):
            grouped = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        return grouped.squeeze(2)

    return run


def sdpa(q: Any, k: Any, v: Any, indptr: Any, slots: Any, lengths: list[int]) -> Callable[[], Any] | str:
    """torch SDPA, flash backend, on a dense copy."""
    from torch.nn.attention import SDPBackend

    return _dense(q, k, v, slots, lengths, SDPBackend.FLASH_ATTENTION)


def cudnn(q: Any, k: Any, v: Any, indptr: Any, slots: Any, lengths: list[int]) -> Callable[[], Any] | str:
    """torch SDPA, cuDNN backend, on a dense copy."""
    from torch.nn.attention import SDPBackend

    return _dense(q, k, v, slots, lengths, SDPBackend.CUDNN_ATTENTION)


PEERS: dict[str, Callable[..., Callable[[], Any] | str]] = {
    "sglang_triton": sglang_triton,
    "flashinfer": flashinfer,
    "sdpa_dense": sdpa,
    "cudnn_dense": cudnn,
}
