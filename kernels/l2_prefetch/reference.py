"""Decode attention in float64, one query head at a time: short enough to be checked by reading."""

from __future__ import annotations

import torch

from sglang_hicache_ext.kernels.l2_prefetch.check import DecodeParams, KvIndex


def token_slots(index: KvIndex, request: int, page_tokens: int) -> list[int]:
    """Pool slots of a request's tokens, oldest first."""
    start, stop = int(index.indptr[request]), int(index.indptr[request + 1])
    if index.seq_lens is None:
        return [int(s) for s in index.entries[start:stop]]
    length = int(index.seq_lens[request])
    return [int(index.entries[start + n // page_tokens]) * page_tokens + n % page_tokens for n in range(length)]


def pool_row(pool: torch.Tensor, slot: int, params: DecodeParams) -> torch.Tensor:
    """[KV heads, head_dim] float64 of one token."""
    if params.layout == "NHD":
        return pool[slot].double()
    return pool[slot // params.page_tokens, :, slot % params.page_tokens].double()


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: KvIndex,
    params: DecodeParams,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``decode_attention`` should return, from tensors on the host.

    Returns:
        output [batch, query heads, head_dim] and natural-log LSE [batch, query heads], both float64.
        A request without tokens gives zeros, and an LSE of -inf or the sink.
    """
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.zeros(batch, heads, dim, dtype=torch.float64)
    lse = torch.full((batch, heads), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        slots = token_slots(index, b, params.page_tokens)
        if params.window:
            slots = slots[-params.window :]
        if slots:
            keys, values = (torch.stack([pool_row(pool, s, params) for s in slots], dim=1) for pool in (k, v))
        else:
            keys = values = torch.zeros(kv_heads, 0, dim, dtype=torch.float64)
        for h in range(heads):
            kv_head = h // group
            scores = keys[kv_head] @ q[b, h].double() * (params.k_scale * params.sm_scale)
            if params.soft_cap:
                scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].double().reshape(1)])
            if not len(scores):
                continue
            lse[b, h] = torch.logsumexp(scores, 0)
            weights = torch.exp(scores - lse[b, h])[: len(slots)]
            out[b, h] = weights @ values[kv_head] * params.v_scale
    return out, lse
