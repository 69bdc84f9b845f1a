"""The places where SGLang has no extension point of its own, hooked through its plugin registry.

Each hook passes straight through unless our backend, or a weight update under HiCache, is concerned. They must be in
place before the scheduler is built, because it keeps bound methods; the plugin entry point sees to it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.sglang_adapter import identity, sglang_api
from sglang_hicache_ext.sglang_adapter.epoch import CURRENT, token_from
from sglang_hicache_ext.sglang_adapter.stores import CLI_NAMES

logger = logging.getLogger(__name__)

MODULE = "sglang_hicache_ext.sglang_adapter.storage"
CLASS = "HiCacheExtStorage"
LINKER_MODULE = "sglang_hicache_ext.sglang_adapter.linker"

_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)


@dataclass
class _Installed:
    targets: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)


_INSTALLED = _Installed()


def health() -> dict[str, Any]:
    """Which hooks are in place and which are not, with the reason. JSON-ready."""
    return {"installed": len(_INSTALLED.targets), "problems": dict(_INSTALLED.problems)}


def install() -> None:
    """Register every hook this process can need; SGLang's plugin loader applies them. Idempotent."""
    if "sglang.srt.managers.scheduler" in sys.modules:
        _register(_controller_hooks() + _scheduler_hooks())


def ensure_installed() -> None:
    """Register and apply at construction of a backend, for when the plugin entry point was not run."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    wanted = _controller_hooks()
    if "sglang.srt.managers.scheduler" in sys.modules:
        wanted += _scheduler_hooks()
    if _register(wanted):
        HookRegistry.apply_hooks()


Hook = tuple[str, Callable[..., Any], str]


def _controller_hooks() -> list[Hook]:
    return [
        (f"{_CONTROLLER}.attach_storage_backend", _attach_by_name, "AROUND"),
        (f"{_HYBRID}.attach_storage_backend", _attach_or_roll_back, "AROUND"),
        (f"{_CONTROLLER}._page_backup_or_log", _backup_in_its_epoch, "AROUND"),
        (f"{_HYBRID}.should_backup", _rank_sharded_drafts, "AROUND"),
    ]


def _scheduler_hooks() -> list[Hook]:
    updates: list[Hook] = [(f"{_UPDATER}.{name}", _update_weights, "AROUND") for name in _UPDATES]
    return [
        *updates,
        (f"{_SCHEDULER}.flush_cache", _after_flush, "AFTER"),
        (f"{_STATE}.get_internal_state", _add_state, "AFTER"),
    ]


def _register(wanted: list[Hook]) -> int:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    added = 0
    for target, hook, kind in wanted:
        if target in _INSTALLED.targets:
            continue
        if not _exists(target):
            _INSTALLED.problems[target] = "not in this SGLang"
            continue
        HookRegistry.register(target, hook, HookType[kind])
        _INSTALLED.targets.add(target)
        added += 1
    return added


def _exists(target: str) -> bool:
    import pkgutil

    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def is_ours(storage_backend: Any, extra: Any) -> bool:
    """True for our names, and for ``dynamic`` with our module."""
    if storage_backend in CLI_NAMES:
        return True
    return storage_backend == "dynamic" and (extra or {}).get("module_path") == MODULE


def _attach_by_name(
    original: Callable[..., Any], controller: Any, storage_backend: str, *args: Any, **kwargs: Any
) -> Any:
    """Route our names to our class: SGLang's ``dynamic`` with the zero-copy interface."""
    key = "storage_backend_extra_config"
    extra = kwargs[key] if key in kwargs else (args[2] if len(args) > 2 else None)
    if not is_ours(storage_backend, extra):
        return original(controller, storage_backend, *args, **kwargs)
    _refuse_context_parallel_decode()
    if storage_backend not in CLI_NAMES:
        return original(controller, storage_backend, *args, **kwargs)
    routed = {**(extra or {}), **_routing(storage_backend)}
    if key in kwargs or len(args) <= 2:
        kwargs[key] = routed
    else:
        args = (*args[:2], routed, *args[3:])
    result = original(controller, "dynamic", *args, **kwargs)
    controller.storage_backend_type = storage_backend
    return result


def _routing(name: str) -> dict[str, Any]:
    return {"backend_name": name, "module_path": MODULE, "class_name": CLASS, "interface_v1": 1}


def _refuse_context_parallel_decode() -> None:
    from sglang.srt.runtime_context import get_parallel

    try:
        size = int(getattr(get_parallel(), "attn_dcp_size", 1) or 1)
    except Exception:
        return
    if size > 1:
        raise ConfigError(
            "decode context parallelism (DCP) is not supported", "--dcp-size", "start with --dcp-size 1, or without L3"
        )


def _attach_or_roll_back(
    original: Callable[..., Any], controller: Any, storage_backend: str, *args: Any, **kwargs: Any
) -> Any:
    """SGLang registers side pools after its own rollback ends; a refused pool must not leave threads behind."""
    try:
        return original(controller, storage_backend, *args, **kwargs)
    except Exception:
        if is_ours(storage_backend, kwargs.get("storage_backend_extra_config")) and controller.enable_storage:
            controller.detach_storage_backend()
        raise


def _backup_in_its_epoch(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Write a node's pages under the epoch they were made in, or not at all."""
    with CURRENT.pinned(int(operation.id)) as is_current:
        return original(controller, operation) if is_current else None


def _rank_sharded_drafts(original: Callable[..., Any], controller: Any, transfer: Any) -> Any:
    """Let every rank write its shard of an MHA draft beside a replicated MLA target; SGLang does so for one store only."""
    if original(controller, transfer):
        return True
    backend_type = controller.storage_backend_type
    extra = getattr(getattr(controller, "storage_config", None), "extra_config", None)
    if not is_ours(backend_type, extra) or str(getattr(transfer.name, "value", transfer.name)) not in (
        "draft",
        "draft_swa",
    ):
        return False
    entry = controller.mem_pool_host.entry_map.get(transfer.name)
    return entry is not None and any(c.__name__ == "MHATokenToKVPoolHost" for c in type(entry.host_pool).__mro__)


def _hicache_is_on() -> bool:
    from sglang.srt.runtime_context import get_memory

    try:
        memory = get_memory()
        linker = getattr(memory, "enable_unified_cache_external_linker", False)
        return bool(memory.enable_hierarchical_cache or linker)
    except Exception:
        return True


def _update_weights(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Any change of weights starts a new epoch before the first of them moves."""
    if not _hicache_is_on():
        return original(updater, request)
    token = shared_token(getattr(updater, "tp_cpu_group", None))
    CURRENT.begin_update(token, sglang_api.next_operation_id())
    weights = _identity_of_update(updater, request)
    if weights:
        CURRENT.name_weights(weights)
    done = False
    try:
        result = original(updater, request)
        done = bool(getattr(result, "success", True))
    finally:
        if weights and not done:  # some weights may have moved: nothing names them any more
            CURRENT.begin_update(token_from(token.encode()), sglang_api.next_operation_id())
    logger.info("sglang-hicache-ext: weights changed; pages now belong to epoch %r", CURRENT.now.value)
    return result


def _identity_of_update(updater: Any, request: Any) -> str:
    """Identity of the files of an update from disk, when they alone decide the weights; "" otherwise."""
    path = getattr(request, "model_path", None)
    plain = getattr(request, "load_format", None) in (None, "auto", "safetensors")
    if not path or not plain or getattr(updater, "draft_worker", None) is not None:
        return ""
    try:
        found = identity.identity_of(str(path))
        return "" if found.startswith(identity.BY_NAME) else found
    except OSError as error:
        logger.warning("the weights at %s cannot be read (%s); the new epoch is random", path, error)
        return ""


def shared_token(group: Any) -> str:
    """A random token, the same on every rank of ``group``; every rank must call it."""
    import torch
    from torch import distributed

    raw = torch.tensor(list(os.urandom(16)), dtype=torch.uint8)
    if group is not None and distributed.is_initialized() and distributed.get_world_size(group) > 1:
        distributed.broadcast(raw, src=distributed.get_global_rank(group, 0), group=group)
    return token_from(bytes(raw.tolist()))


def _after_flush(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if result and CURRENT.is_mixed:
        CURRENT.flushed(sglang_api.next_operation_id())


def _add_state(result: Any, *_: Any, **__: Any) -> None:
    """Show our state where SGLang shows its own (``/server_info``)."""
    modules = [sys.modules.get(name) for name in (MODULE, LINKER_MODULE)]
    for backend in [b for module in modules if module is not None for b in list(module.LIVE)]:
        try:
            result.internal_state["hicache_ext"] = backend.describe()
        except Exception as error:
            logger.debug("no state of the backend: %s", error)
