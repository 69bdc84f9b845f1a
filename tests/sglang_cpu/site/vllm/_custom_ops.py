"""Plain torch versions of the three fused operations that SGLang takes from vllm where it finds no accelerator.

Source: sglang 0.5.23 srt/layers/rotary_embedding/base.py:138, srt/layers/layernorm.py:130.
"""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Rotate ``query`` and ``key`` ([tokens, heads * head_size]) in place."""
    tokens = positions.numel()
    cos, sin = cos_sin_cache[positions.reshape(-1).long()].float()[:, None, :].chunk(2, dim=-1)
    width = 2 * cos.shape[-1]
    for flat in (query, key):
        if flat is not None:
            part = flat.view(tokens, -1, head_size)[..., :width]
            part.copy_(_rotated(part.float(), cos, sin, is_neox))


def _rotated(x, cos, sin, is_neox):
    if is_neox:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rms_norm(out, x, weight, eps):
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    out.copy_((wide * scale).to(x.dtype) * weight)


def fused_add_rms_norm(x, residual, weight, eps):
    residual += x
    rms_norm(x, residual, weight, eps)
