"""The fingerprint of each host pool, taken from SGLang at start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.sglang_adapter.host_pool import PoolPages
from sglang_hicache_ext.sglang_adapter.weights import weights_identity

logger = logging.getLogger(__name__)

BENIGN_CONFIG_KEYS = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "architectures_source"})
"""Fields of a model config that name where it came from; they change no byte of the KV cache."""

BY_NAME = "name:"
"""Begins an identity that could not be taken from files."""

SHARDED_ON_REPLICATED_ANCHOR = frozenset({"mamba"})
"""Pools that every TP rank owns a shard of even where the KV pool is replicated (MLA).

Source: sglang 0.5.23 srt/mem_cache/hybrid_cache/hybrid_cache_controller.py:1739-1759.
"""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What SGLang serves, as far as it decides bytes. The same on every rank but for the ranks themselves.

    Attributes:
        weights: identity of the model weights.
        config_hash: hash of the resolved model config.
        draft: identity of the draft model, "" without speculative decoding.
        adapters: identity of the LoRA adapters given at start, "" without any.
        tp, pp, cp: "rank/size", "-" for a size of one.
        is_replicated: the KV pool is the same on every TP rank (MLA).
        is_writer: this rank writes the replicated pools.
        extra: further facts, such as quantization.
    """

    weights: str
    config_hash: str = ""
    draft: str = ""
    adapters: str = ""
    tp: str = "-"
    pp: str = "-"
    cp: str = "-"
    is_replicated: bool = False
    is_writer: bool = True
    namespace: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)


def _shard(rank: Any, size: Any) -> str:
    return f"{int(rank or 0)}/{int(size)}" if size and int(size) > 1 else "-"


def deployment_of(storage_config: Any, namespace: str) -> Deployment:
    """Read the deployment from SGLang's storage config and, where a server runs, its resolved arguments.

    Raises:
        ConfigError: decode context parallelism, or split heads: their page identity is not supported.
    """
    if getattr(storage_config, "dcp_size", 1) > 1:
        raise ConfigError("decode context parallelism (DCP) is not supported", "--dcp-size", "start with --dcp-size 1")
    if getattr(storage_config, "should_split_heads", False):
        raise ConfigError("tp_lcm_size splits heads, which is not supported", "extra config", "remove tp_lcm_size")
    args = server_args()
    extra = dict(getattr(storage_config, "extra_config", None) or {})
    tag = str(extra.get("extra_backend_tag") or "")
    facts = _facts(args) if args is not None else {"model_name": str(storage_config.model_name or "")}
    return Deployment(
        weights=_target_weights(args) or f"{BY_NAME}{storage_config.model_name or ''}",
        config_hash=_config_hash(args),
        draft=_draft_weights(args),
        adapters=_adapters(args),
        tp=_shard(storage_config.tp_rank, storage_config.tp_size),
        pp=_shard(getattr(storage_config, "pp_rank", 0), getattr(storage_config, "pp_size", 1)),
        cp=_shard(getattr(storage_config, "attn_cp_rank", 0), getattr(storage_config, "attn_cp_size", 1)),
        is_replicated=bool(storage_config.is_mla_model),
        is_writer=bool(getattr(storage_config, "is_storage_writer", True)),
        namespace="\0".join(part for part in (namespace, tag) if part),
        extra=facts,
    )


def server_args() -> Any:
    """SGLang's resolved arguments; None outside a server (unit tests, tools)."""
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        return args if getattr(args, "model_path", None) else None
    except Exception:
        return None


def _facts(args: Any) -> dict[str, str]:
    names = ("quantization", "dtype", "kv_cache_dtype", "speculative_algorithm", "load_format")
    facts = {name: str(getattr(args, name)) for name in names if getattr(args, name, None) not in (None, "auto")}
    scales = getattr(args, "quantization_param_path", None)
    if scales:
        facts["kv_scales"] = _identity_at_start(str(scales), None)
    return facts


@lru_cache(maxsize=16)
def local_directory(model_path: str, revision: str | None = None) -> str:
    """The directory of a model's files: the path itself, or the local snapshot of a hub name; "" when unknown."""
    if os.path.exists(model_path):
        return model_path
    if model_path.count("/") > 1 or model_path.startswith((".", "/")):
        return ""
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model_path, revision=revision, local_files_only=True))
    except Exception as error:
        logger.warning("no local snapshot of %s (%s)", model_path, error)
        return ""


def identity_of(model_path: str, revision: str | None = None) -> str:
    """Identity of the weights at ``model_path``; name and revision where no files can be found."""
    directory = local_directory(model_path, revision)
    identity = weights_identity(directory) if directory else ""
    if not identity:
        logger.warning("the weights of %s cannot be read; its name and revision stand in for them", model_path)
    return identity or f"{BY_NAME}{model_path}@{revision or ''}"


@lru_cache(maxsize=16)
def _identity_at_start(model_path: str, revision: str | None) -> str:
    """Cached: what was loaded at start stays the identity, also when files change below a running server."""
    return identity_of(model_path, revision)


def _target_weights(args: Any) -> str:
    return _identity_at_start(args.model_path, getattr(args, "revision", None)) if args is not None else ""


def _draft_weights(args: Any) -> str:
    path = getattr(args, "speculative_draft_model_path", None)
    return _identity_at_start(path, getattr(args, "speculative_draft_model_revision", None)) if path else ""


def _adapters(args: Any) -> str:
    """Identity of the adapters given at start.

    SGLang's page keys name such an adapter by its name and path, so its bytes must be named here; an adapter loaded
    later gets a key of its own. Source: sglang 0.5.23 srt/lora/lora_registry.py:32-57.
    """
    refs = getattr(args, "lora_paths", None) or []
    found = sorted((str(ref.lora_name), _identity_at_start(str(ref.lora_path), None)) for ref in refs)
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32] if found else ""


def _config_hash(args: Any) -> str:
    """Hash of the model config as SGLang resolves it, overrides such as RoPE scaling included. No network."""
    directory = local_directory(args.model_path, getattr(args, "revision", None)) if args is not None else ""
    if not directory:
        return config_hash({"overrides": str(getattr(args, "json_model_override_args", ""))})
    try:
        from sglang.srt.configs.model_config import ModelConfig

        config = ModelConfig.from_server_args(args, model_path=directory)
        return config_hash({**config.hf_config.to_dict(), "context_len": getattr(config, "context_len", None)})
    except Exception as error:
        logger.warning("no resolved model config (%s); its file and the overrides stand in for it", error)
        return _config_file_hash(directory, str(getattr(args, "json_model_override_args", "")))


def _config_file_hash(directory: str, overrides: str) -> str:
    try:
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as f:
            return config_hash({"file": json.load(f), "overrides": overrides})
    except (OSError, ValueError):
        return config_hash({"overrides": overrides})


def config_hash(config: Mapping[str, Any]) -> str:
    """32 hex digits over a model config, without the fields that only name its origin."""
    kept = {k: v for k, v in config.items() if k not in BENIGN_CONFIG_KEYS}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def is_sharded(deployment: Deployment, pool: Any, name: str) -> bool:
    """True when each TP rank holds different bytes of this pool."""
    if not deployment.is_replicated or name in SHARDED_ON_REPLICATED_ANCHOR:
        return True
    return any(cls.__name__ == "MHATokenToKVPoolHost" for cls in type(pool).__mro__)


def pool_fingerprint(
    deployment: Deployment, pool: Any, name: str, pages: PoolPages, *, weights: str | None, epoch: str
) -> Fingerprint:
    """Fingerprint of one host pool.

    Args:
        weights: identity of the weights now served, None for those of the start.
        epoch: weight epoch, "" when ``weights`` alone names what is served.
    """
    packed = getattr(pool, "layer_num", 0) != getattr(pool, "target_layer_num", getattr(pool, "layer_num", 0))
    extra = {
        **deployment.extra,
        "form": pages.form,
        "pool_class": type(pool).__name__,
        "region_bytes": ",".join(map(str, pages.region_sizes)),
        "layers": str(getattr(pool, "layer_num", "")),
        "format_tag": str(getattr(pool, "storage_format_tag", None) or ""),
    }
    if deployment.draft and (packed or name.startswith("draft")):
        extra["draft"] = deployment.draft
    return Fingerprint(
        model=weights or deployment.weights,
        config_hash=deployment.config_hash,
        dtype=str(getattr(pool, "dtype", "")),
        page_tokens=pages.page_tokens,
        layout=str(getattr(pool, "layout", "")),
        layer_start=int(getattr(pool, "start_layer", 0) or 0),
        layer_end=int(getattr(pool, "end_layer", 0) or 0),
        heads=int(getattr(pool, "head_num", 1) or 1),
        k_dim=int(getattr(pool, "head_dim", 0) or getattr(pool, "kv_cache_dim", 0) or 0),
        v_dim=int(getattr(pool, "v_head_dim", 0) or 0),
        tp=deployment.tp if is_sharded(deployment, pool, name) else "-",
        pp=deployment.pp,
        cp=deployment.cp,
        pool=name,
        adapter=deployment.adapters,
        epoch=epoch,
        namespace=deployment.namespace,
        extra=extra,
    )
