"""``--attention-backend l2_prefetch``: registration with SGLang, and every reason to refuse a model at start.

Importing this module needs no GPU. SGLang's Triton backend is imported when a backend is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_hicache_ext.errors import CapabilityError, ConfigError
from sglang_hicache_ext.kernels.l2_prefetch.planner import MODES
from sglang_hicache_ext.kernels.l2_prefetch.tuning import GROUPS, HEAD_DIMS

NAME = "l2_prefetch"
MODE_VARIABLE = "HICACHE_EXT_L2_PREFETCH"
KV_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float8_e4m3fn", "torch.float8_e5m2")
MIN_SM = 80
MIN_SM_E4M3 = 89


def install_attention_backend() -> None:
    """Make ``l2_prefetch`` a choice of SGLang's attention options and register it. Idempotent.

    Call before SGLang parses its arguments.

    Source: sglang 0.5.23 srt/arg_groups/choices.py:225, srt/layers/attention/attention_registry.py:45.
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(create_backend)


def prefetch_mode() -> str:
    """The environment's prefetch mode, "auto" when unset. Raises ConfigError."""
    mode = os.environ.get(MODE_VARIABLE, "auto")
    if mode not in MODES:
        raise ConfigError(f"{MODE_VARIABLE} is {mode!r}", "environment", f"write one of {', '.join(MODES)}")
    return mode


@dataclass(frozen=True, slots=True)
class Layer:
    """What the backend needs to know of one attention layer of this rank."""

    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    capping: str = "tanh"
    temperature_len: int = -1
    cross: bool = False
    kind: str = "decoder"
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """A model runner, as far as this backend cares.

    Attributes:
        device: "cuda" on NVIDIA, else what it is ("hip", "cpu", ...).
        sm: compute capability times ten; 0 without a GPU.
        kv_dtype: of the pool, as torch prints it.
        pool_dims: dimensions of one layer's key buffer; 3 is [slots, KV heads, head_dim].
        layers: distinct attention layers.
        features: name -> True for each feature in use that decides support, in the user's words.
    """

    device: str
    sm: int
    kv_dtype: str
    pool_dims: int
    layers: tuple[Layer, ...]
    features: dict[str, bool] = field(default_factory=dict)


UNSUPPORTED = {
    "MLA": "multi-head latent attention has one latent head of 512 and more",
    "encoder-decoder models": "cross attention reads the encoder's cache",
    "speculative decoding": "a draft has several query tokens per request",
    "decode context parallelism": "ranks would have to merge their results by LSE",
    "deterministic inference": "the splits of a request depend on the batch it is in",
    "diffusion language models": "they decode blocks of tokens",
    "two-batch overlap": "not tested with this backend",
    "PD multiplexing": "not tested with this backend",
    "hybrid linear-attention models": "not tested with this backend",
    "a quantized KV cache other than fp8": "its pool holds packed values",
    "the HND pool (SGLANG_USE_HND_KVCACHE)": "SGLang's Triton metadata names token slots of an NHD pool",
}
"""Feature -> why it is refused; the names are those of ``Facts.features``."""


def refusals(facts: Facts) -> list[str]:
    """Every reason why ``facts`` cannot be served; empty when it can."""
    out = [f"{name}: {UNSUPPORTED[name]}" for name, used in facts.features.items() if used]
    if facts.device != "cuda":
        out.append(f"device {facts.device!r}: needs an NVIDIA GPU")
    elif facts.sm < (least := MIN_SM_E4M3 if "e4m3" in facts.kv_dtype else MIN_SM):
        out.append(f"compute capability {facts.sm / 10:.1f}: KV dtype {facts.kv_dtype} needs {least / 10:.1f}")
    if facts.kv_dtype not in KV_DTYPES:
        out.append(f"KV dtype {facts.kv_dtype}: use one of {', '.join(KV_DTYPES)}")
    if facts.pool_dims != 3:
        out.append(f"KV pool with {facts.pool_dims} dimensions: needs [slots, KV heads, head_dim]")
    for windowed in (False, True):
        heads = {(x.query_heads, x.kv_heads, x.qk_dim) for x in facts.layers if x.windowed is windowed}
        if len(heads) > 1:
            out.append(f"layers of one kind with different heads {sorted(heads)}: they must be alike")
    checks: tuple[Callable[[Layer], str], ...] = (_head_dim, _group, _kind)
    return out + sorted({text for layer in facts.layers for check in checks if (text := check(layer))})


def _head_dim(layer: Layer) -> str:
    if layer.qk_dim != layer.v_dim:
        return f"head_dim {layer.qk_dim} of K and {layer.v_dim} of V: they must be equal"
    return "" if layer.qk_dim in HEAD_DIMS else f"head_dim {layer.qk_dim}: use one of {HEAD_DIMS}"


def _group(layer: Layer) -> str:
    if layer.kv_heads and layer.query_heads % layer.kv_heads == 0 and layer.query_heads // layer.kv_heads in GROUPS:
        return ""
    return f"{layer.query_heads} query heads over {layer.kv_heads} KV heads: needs a whole group of 1 to {GROUPS[-1]}"


def _kind(layer: Layer) -> str:
    if layer.cross:
        return "cross attention layers: the encoder's cache is not read"
    if layer.kind != "decoder":
        return f"{layer.kind} attention: only causal decoder layers"
    if layer.temperature_len > 0:
        return "attention temperature (xai_temperature_len): not in the kernel"
    return "" if layer.capping == "tanh" else f"logit capping method {layer.capping!r}: use 'tanh'"


def create_backend(runner: Any) -> Any:
    """SGLang's factory of the backend; runs in the scheduler process.

    Raises:
        CapabilityError: with every unsupported feature by name.
    """
    from sglang_hicache_ext.sglang_adapter.attention_backend import build, gather_facts

    reasons = refusals(gather_facts(runner))
    if reasons:
        raise CapabilityError(
            f"attention backend {NAME} does not support: " + "; ".join(reasons),
            "--attention-backend / --decode-attention-backend",
            "use triton, flashinfer or fa3 for this model",
        )
    return build(runner, prefetch_mode())
