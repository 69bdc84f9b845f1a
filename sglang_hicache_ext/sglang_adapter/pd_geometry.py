"""SGLang's KVArgs as the geometry that both sides of a transfer compare, and the index spaces beside the KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer
from sglang_hicache_ext.sglang_adapter import compat

STATES_BY_ROW = ("dsa_tail",)
"""State that SGLang addresses inside a row; a list of whole rows cannot carry it."""
AUX = "aux"


def geometry_of(args: Any, pool: Any, facts: dict[str, str], device: int) -> Geometry:
    """Describe the registered buffers of one rank.

    Args:
        args: SGLang's KVArgs, filled.
        pool: the device pool, for its number of layers; None: one buffer is one layer.
        facts: what else must be equal on both sides.
        device: CUDA device of the KV pool, -1 for host memory.

    Raises:
        CapabilityError: a kind of state that cannot be sent.
    """
    _refuse_what_cannot_be_sent(args)
    pages = _page_buffers(args, pool, device)
    last = max((b.layer for b in pages), default=0)
    return Geometry((*pages, *_aux_buffers(args, last), *_state_buffers(args, last, device)), facts)


def _refuse_what_cannot_be_sent(args: Any) -> None:
    found = [s for s in map(name_of, args.state_types) if s in STATES_BY_ROW]
    if found:
        raise CapabilityError(
            f"state {', '.join(found)} of this model is not supported",
            "--disaggregation-transfer-backend hicache_ext",
            "use --disaggregation-transfer-backend mooncake",
        )


def name_of(state_type: Any) -> str:
    return str(getattr(state_type, "value", state_type))


def layers_of(args: Any, pool: Any) -> list[int]:
    """Step of the forward after which each entry of ``kv_data_ptrs`` is filled; draft layers count on.

    SGLang registers k0..k(L-1) and then v0..v(L-1), for the target and then for the draft.

    Source: sglang 0.5.23 srt/disaggregation/utils.py:1114-1172, srt/mem_cache/memory_pool.py:2775.
    """
    draft = int(getattr(args, "num_draft_entries", 0) or 0)
    target = len(args.kv_data_ptrs) - draft
    count = int(getattr(pool, "layer_num", 0) or 0)
    if count <= 0 or target % count:
        count = target
    steps = [i % count for i in range(target)]
    return steps + [count] * draft


def _page_buffers(args: Any, pool: Any, device: int) -> list[LayerBuffer]:
    rows = zip(layers_of(args, pool), args.kv_data_ptrs, args.kv_item_lens, args.kv_data_lens, strict=True)
    return [
        LayerBuffer(f"kv.{i}", layer, int(addr), int(item), int(size) // int(item), device=device)
        for i, (layer, addr, item, size) in enumerate(rows)
    ]


def _aux_buffers(args: Any, layer: int) -> list[LayerBuffer]:
    rows = zip(args.aux_data_ptrs, args.aux_item_lens, args.aux_data_lens, strict=True)
    return [
        LayerBuffer(f"{AUX}.{i}", layer, int(addr), int(item), int(size) // int(item), AUX)
        for i, (addr, item, size) in enumerate(rows)
    ]


def _state_buffers(args: Any, layer: int, device: int) -> list[LayerBuffer]:
    found = []
    for at, space in enumerate(state_spaces(args)):
        rows = zip(args.state_data_ptrs[at], args.state_item_lens[at], args.state_data_lens[at], strict=True)
        found += [
            LayerBuffer(f"{space}.{i}", layer, int(addr), int(item), int(size) // int(item), space, device)
            for i, (addr, item, size) in enumerate(rows)
            if addr and item and size
        ]
    return found


def state_spaces(args: Any) -> list[str]:
    """Name of the index space of each state component."""
    return [f"state{i}.{name_of(kind)}" for i, kind in enumerate(args.state_types)]


def extra_items(
    args: Any, aux_index: int | None, state_indices: Sequence[Any] | None, spaces: frozenset[str]
) -> dict[str, NDArray[np.int64]]:
    """Item ids of every index space in ``spaces``, from what SGLang hands to send and to send_metadata."""
    items = {AUX: [] if aux_index is None else [int(aux_index)]}
    for at, space in enumerate(state_spaces(args)):
        found = state_indices[at] if state_indices is not None and at < len(state_indices) else None
        items[space] = [] if found is None else found
    return {k: np.asarray(v, dtype=np.int64).reshape(-1) for k, v in items.items() if k in spaces}


def facts_of(manager: Any, model: str) -> dict[str, str]:
    """What must be equal beside the shapes. Ranks of the two sides pair one to one, so their widths must be equal too."""
    args = manager.kv_args
    facts = {
        "page_tokens": str(args.page_size),
        "kv_cache_dtype": str(args.kv_cache_dtype_str),
        "attention_tp": f"rank {manager.attn_tp_rank} of {manager.attn_tp_size}",
        "pp": f"rank {manager.pp_rank} of {manager.pp_size}",
        "model": model,
        "sglang": compat.installed_version("sglang") or "unknown",
    }
    if manager.is_mla_backend:  # every rank holds the same latent KV
        facts["attention_tp"] = "any"
    if args.kv_layout is not None:
        facts["kv_layout"] = str(args.kv_layout)
    return facts
