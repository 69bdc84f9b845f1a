"""Who this rank is and what its pages are called, for the direct linker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.sglang_adapter.epoch import Epoch
from sglang_hicache_ext.sglang_adapter.identity import Deployment, deployment_of
from sglang_hicache_ext.sglang_adapter.linker_pools import WHERE, DevicePool

LAYOUT = "linker"
"""Stands where the host layout stands: pages of the linker and of the host tier are never taken for each other."""


def rank_and_size(params: Any) -> tuple[int, int]:
    """This rank's place in the group that shards the KV heads."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)


def linker_deployment(server_args: Any, params: Any, is_replicated: bool, namespace: str) -> Deployment:
    """Raises CapabilityError for features whose pages the linker could not name or restore."""
    _refuse(server_args, params)
    rank, size = rank_and_size(params)
    return deployment_of(
        SimpleNamespace(
            tp_rank=rank,
            tp_size=size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank,
            attn_cp_size=params.attn_cp_size,
            dcp_size=int(getattr(server_args, "dcp_size", 1) or 1),
            is_mla_model=is_replicated,
            is_storage_writer=not is_replicated or rank == 0,
            model_name=str(getattr(server_args, "served_model_name", "") or ""),
            extra_config={},
        ),
        namespace,
    )


def _refuse(server_args: Any, params: Any) -> None:
    drafts = params.mtp_draft_device_pools or params.sidecar_draft_device_pools or params.mtp_draft_mamba_pools
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if drafts or params.is_eagle or algorithm not in (None, "NGRAM"):
        raise CapabilityError(
            f"the linker does not support speculative decoding with a draft model ({algorithm})",
            WHERE,
            "start without it, or use the `nvme` storage backend",
        )


def pool_fingerprint(deployment: Deployment, pool: DevicePool, epoch: Epoch) -> Fingerprint:
    """Fingerprint of one device pool in one weight epoch."""
    source = pool.pool
    return Fingerprint(
        model=epoch.weights or deployment.weights,
        config_hash=deployment.config_hash,
        dtype=str(getattr(source, "dtype", "")),
        page_tokens=pool.page_tokens,
        layout=LAYOUT,
        layer_start=int(getattr(source, "start_layer", 0) or 0),
        layer_end=int(getattr(source, "end_layer", 0) or 0),
        heads=int(getattr(source, "head_num", 1) or 1),
        k_dim=int(getattr(source, "head_dim", 0) or getattr(source, "kv_cache_dim", 0) or 0),
        v_dim=int(getattr(source, "v_head_dim", 0) or 0),
        tp="-" if pool.is_replicated else deployment.tp,
        pp=deployment.pp,
        cp=deployment.cp,
        pool=pool.name,
        adapter=deployment.adapters,
        epoch=epoch.value,
        namespace=deployment.namespace,
        extra={
            **deployment.extra,
            "pool_class": type(source).__name__,
            "store_dtype": str(getattr(source, "store_dtype", "")),
            "sums": "device" if pool.has_sums else "",
            "run_bytes": ",".join(str(n) for runs in pool.geometry.runs for n in runs),
        },
    )
