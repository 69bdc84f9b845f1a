# mypy: disable-error-code="misc, no-untyped-call"
"""SGLang's Triton attention backend with our decode kernel in it.

Prefill, metadata, sliding-window index rail and CUDA-graph buffers are SGLang's. Ours are the decode
call, the schedule (work items and prefetch distance, computed on the device) and the workspace.
Under a CUDA graph the schedule is filled inside the graph, so every replay adapts to its lengths.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.kernels.l2_prefetch.attention import (
    Workspace,
    alloc_workspace,
    decode_attention,
    device_gpu,
)
from sglang_hicache_ext.kernels.l2_prefetch.check import FP8_DTYPES, QUERY_DTYPES, DecodeParams, KvIndex
from sglang_hicache_ext.kernels.l2_prefetch.planner import Plan, Shape, choose_prefetch, item_bound
from sglang_hicache_ext.kernels.l2_prefetch.schedule import Schedule, alloc_schedule, fill_schedule
from sglang_hicache_ext.kernels.l2_prefetch.tuning import load_table
from sglang_hicache_ext.sglang_adapter.attention import Facts, Layer

logger = logging.getLogger(__name__)


def attention_layers(model: torch.nn.Module) -> tuple[Layer, ...]:
    """The distinct kinds of attention layers of a model, in order of appearance."""
    found = [
        Layer(
            m.tp_q_head_num,
            m.tp_k_head_num,
            m.qk_head_dim,
            m.v_head_dim,
            m.logit_capping_method,
            m.xai_temperature_len,
            m.is_cross_attention,
            m.attn_type.value,
            m.sliding_window_size is not None and m.sliding_window_size > -1,
        )
        for m in model.modules()
        if isinstance(m, RadixAttention)
    ]
    return tuple(dict.fromkeys(found))


def gather_facts(runner: Any) -> Facts:
    """Read a model runner and SGLang's runtime context."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

    config, pool = runner.model_config, runner.token_to_kv_pool
    layers = attention_layers(runner.model)
    is_mla = bool(runner.use_mla_backend)
    keys = None if is_mla else pool.get_key_buffer(pool.start_layer)
    features = {
        "MLA": is_mla,
        "encoder-decoder models": bool(config.is_encoder_decoder),
        "speculative decoding": get_spec().speculative_algorithm is not None,
        "decode context parallelism": get_parallel().attn_dcp_size > 1,
        "deterministic inference": bool(get_exec().deterministic.enable_deterministic_inference),
        "diffusion language models": get_exec().dllm.dllm_algorithm is not None,
        "two-batch overlap": bool(getattr(runner.server_args, "enable_two_batch_overlap", False)),
        "PD multiplexing": bool(getattr(runner.server_args, "enable_pdmux", False)),
        "hybrid linear-attention models": mambaish_config(config) is not None,
        "a quantized KV cache other than fp8": bool(getattr(pool, "is_quantized_kv_cache", False)),
        "the HND pool (SGLANG_USE_HND_KVCACHE)": bool(getattr(pool, "use_hnd", False)),
    }
    device = "hip" if torch.version.hip else str(runner.device).split(":", maxsplit=1)[0]
    sm = 0
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        sm = major * 10 + minor
    dims = 3 if keys is None else keys.dim()
    dtype = str(runner.kv_cache_dtype if keys is None else keys.dtype)
    return Facts(device, sm, dtype, dims, () if is_mla else layers, features)


class Rail:
    """Schedules and workspace for one kind of layer: full attention, or sliding window.

    Used on the scheduler thread. Eager and graph buffers are apart: graph buffers never move.
    """

    def __init__(self, name: str, layer: Layer, kv: str, mode: str, device: torch.device) -> None:
        self.shape = Shape(layer.query_heads, layer.kv_heads, layer.qk_dim, kv)
        self._gpu = device_gpu(device)
        self._mode, self._device, self._name = mode, device, name
        self._tile = load_table().tile(self._gpu.name, self.shape.group, self.shape.head_dim, kv)
        self._plans: dict[int, Plan] = {}
        self._eager: tuple[Schedule, Workspace] | None = None
        self._graph: tuple[Schedule, Workspace] | None = None
        self._current: tuple[Schedule, Workspace] | None = None

    def plan(self, batch: int) -> Plan:
        """Tile and prefetch switch for a batch size; the splits come from the device."""
        if batch not in self._plans:
            chosen = choose_prefetch(self._gpu, self.shape, self._tile, batch, self._mode, load_table())
            if not self._plans:
                logger.info("l2_prefetch, %s layers, batch %d: %s", self._name, batch, "; ".join(chosen.why))
            self._plans[batch] = Plan(self._tile, (), chosen, chosen.why)
        return self._plans[batch]

    def _room(self, max_batch: int) -> tuple[Schedule, Workspace]:
        schedule = alloc_schedule(max_batch, self.shape.kv_heads, self._gpu.sms, self._device)
        return schedule, alloc_workspace(schedule.items, self.shape.query_heads, self.shape.head_dim, self._device)

    def reserve_graph(self, max_batch: int) -> None:
        """Allocate the buffers that captured graphs will point to."""
        self._graph = self._room(max_batch)

    def fill(self, batch: int, indptr: torch.Tensor, in_graph: bool) -> None:
        """Plan ``batch`` requests on the device; recordable in a graph when ``in_graph``."""
        room = self._graph if in_graph else self._eager
        if room is None or room[0].batch < batch:
            if in_graph:
                raise CapabilityError(f"batch {batch} exceeds the CUDA graph buffers", "l2_prefetch backend")
            room = self._eager = self._room(max(batch, 16))
        schedule = room[0].prefix(batch, item_bound(batch, self.shape.kv_heads, self._gpu.sms))
        self._current = schedule, room[1]
        fill_schedule(
            schedule,
            kv_heads=self.shape.kv_heads,
            sms=self._gpu.sms,
            tile=self._tile,
            distance=self.plan(batch).prefetch.distance,
            indptr=indptr,
        )

    def current(self) -> tuple[Schedule, Workspace]:
        if self._current is None:
            raise CapabilityError("decode before any metadata", "l2_prefetch backend", "report this as a bug")
        return self._current


class L2PrefetchAttnBackend(TritonAttnBackend):
    """Built by ``build``; SGLang's scheduler thread owns it."""

    def __init__(self, model_runner: Any, mode: str, layers: tuple[Layer, ...]) -> None:
        super().__init__(model_runner)
        # Partial results live in our workspace, so SGLang's own buffers for them stay at one split.
        self.max_kv_splits = 1
        self.static_kv_splits = True
        pool = self.token_to_kv_pool
        dtype = pool.get_key_buffer(pool.start_layer).dtype
        kv = "fp8" if dtype in FP8_DTYPES else QUERY_DTYPES[dtype]
        device = torch.device(self.device)
        self._full_rail = self._rail("full", [x for x in layers if not x.windowed], kv, mode, device)
        self._window_rail = self._rail("window", [x for x in layers if x.windowed], kv, mode, device)
        self.decode_attention_fwd = torch.compiler.disable(self._decode)

    @staticmethod
    def _rail(name: str, layers: list[Layer], kv: str, mode: str, device: torch.device) -> Rail | None:
        return Rail(name, layers[0], kv, mode, device) if layers else None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        for rail in (self._full_rail, self._window_rail):
            if rail is not None:
                rail.reserve_graph(max(max_bs, max_num_tokens))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._schedule(forward_batch, in_graph=False)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        super().init_forward_metadata_in_graph(forward_batch)
        self._schedule(forward_batch, in_graph=True)

    def _schedule(self, forward_batch: Any, in_graph: bool) -> None:
        batch = int(forward_batch.batch_size)
        if not forward_batch.forward_mode.is_decode_or_idle() or batch == 0:
            return
        data = self.forward_metadata
        if self._full_rail is not None:
            self._full_rail.fill(batch, data.kv_indptr, in_graph)
        if self._window_rail is not None and data.window_kv_indptr is not None:
            self._window_rail.fill(batch, data.window_kv_indptr, in_graph)

    def _decode(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        o: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        attn_logits: torch.Tensor,
        attn_lse: torch.Tensor,
        num_kv_splits: torch.Tensor,
        max_kv_splits: int,
        sm_scale: float,
        k_scale: float,
        v_scale: float,
        logit_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        score_mod: Any = None,
        **ignored: Any,
    ) -> None:
        """Same signature as SGLang's ``decode_attention_fwd``; its split buffers are not used.

        Source: sglang 0.5.23 kernels/ops/attention/decode_attention.py:1191.
        """
        if score_mod is not None:
            raise CapabilityError(
                "attention backend l2_prefetch does not support: score_mod", "decode", "use the triton backend"
            )
        windowed = kv_indptr is self.forward_metadata.window_kv_indptr
        rail = self._window_rail if windowed else self._full_rail
        if rail is None:
            raise CapabilityError("a layer kind that the model did not show", "l2_prefetch backend", "report this")
        schedule, workspace = rail.current()
        decode_attention(
            q,
            k_buffer,
            v_buffer,
            KvIndex(kv_indptr, kv_indices),
            DecodeParams(sm_scale, k_scale, v_scale, soft_cap=logit_cap),
            sinks=sinks,
            plan=rail.plan(schedule.batch),
            schedule=schedule,
            out=o,
            workspace=workspace,
        )


def build(runner: Any, mode: str) -> L2PrefetchAttnBackend:
    """The backend for a runner that ``gather_facts`` found nothing against."""
    return L2PrefetchAttnBackend(runner, mode, attention_layers(runner.model))
