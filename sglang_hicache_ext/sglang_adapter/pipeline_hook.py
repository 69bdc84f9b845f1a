"""Puts our prefetch pipeline in the place of SGLang's, when ``"pipeline": "extension"`` asks for it.

Installed by the backend at its construction, so without the option nothing of SGLang is touched. Caches that
the pipeline does not cover keep SGLang's own path; the log says so once, when storage is attached.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.sglang_adapter.pipeline_bridge import CachePipeline, why_not

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_hicache_ext_pipeline"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_ATTACHMENT = "sglang.srt.mem_cache.unified_cache.storage_attachment.StorageAttachment"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_installed: set[str] = set()
_prefills: deque[tuple[float, int]] = deque(maxlen=16)
_served: list[CachePipeline] = []


def install_pipeline_hook() -> None:
    """Hook the prefetch calls of UnifiedRadixCache. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {
        f"{_CACHE}.prefetch_from_storage": _prefetch_from_storage,
        f"{_CACHE}.check_prefetch_progress": _check_prefetch_progress,
        f"{_CACHE}.release_aborted_request": _release_aborted_request,
        f"{_CACHE}.check_hicache_events": _check_hicache_events,
        f"{_CACHE}.reset": _reset,
        f"{_ATTACHMENT}.apply_runtime_config": _apply_runtime_config,
        f"{_ATTACHMENT}._apply_policies": _apply_policies,
        f"{_ATTACHMENT}.detach": _detach,
    }
    if "sglang.srt.managers.scheduler" in sys.modules:
        hooks[f"{_SCHEDULER}.run_batch"] = _run_batch
        hooks[f"{_SCHEDULER}.process_batch_result"] = _process_batch_result
    new = [target for target in hooks if target not in _installed]
    for target in new:
        HookRegistry.register(target, hooks[target], HookType.AROUND)
        _installed.add(target)
    if new:
        HookRegistry.apply_hooks()


def pipeline_of(cache: Any) -> CachePipeline | None:
    """The pipeline that serves ``cache``; None when SGLang's own does."""
    served: CachePipeline | None = getattr(cache, _ATTRIBUTE, None)
    return served


def state_of(backend: Any) -> dict[str, Any]:
    """Health of the pipelines over ``backend``; empty when SGLang's own serves. JSON-ready."""
    found = [served for served in _served if served.backend is backend]
    return {**found[0].pipeline.health(), "policy": found[0].policy} if found else {}


def attach(cache: Any) -> None:
    """Decide who serves ``cache`` from now on, and say so."""
    _drop(cache, give_back=True)
    backend = getattr(cache.cache_controller, "storage_backend", None)
    config = getattr(backend, "config", None)
    if not isinstance(config, HiCacheExtConfig) or config.pipeline != "extension" or not cache.enable_storage:
        return
    reason = why_not(cache, backend)
    if reason:
        logger.warning("sglang-hicache-ext: SGLang's own prefetch serves this cache: %s", reason)
        return
    served = CachePipeline(cache, backend, config)
    setattr(cache, _ATTRIBUTE, served)
    _served.append(served)
    logger.info("sglang-hicache-ext: our prefetch pipeline serves this cache, policy %s", served.policy)


def _drop(cache: Any, *, give_back: bool) -> None:
    served = pipeline_of(cache)
    if served is not None:
        setattr(cache, _ATTRIBUTE, None)
        _served.remove(served)
        served.close(give_back=give_back)


def _prefetch_from_storage(original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
    served = pipeline_of(cache)
    if served is None or not cache.enable_storage:
        return original(cache, *args, **kwargs)
    return served.prefetch(*args, **kwargs)


def _check_prefetch_progress(original: Callable[..., Any], cache: Any, request: Any) -> Any:
    served = pipeline_of(cache)
    return original(cache, request) if served is None else served.check(request)


def _release_aborted_request(original: Callable[..., Any], cache: Any, request: Any) -> Any:
    served = pipeline_of(cache)
    if served is not None:
        served.abort(request)
    return original(cache, request)


def _check_hicache_events(original: Callable[..., Any], cache: Any) -> Any:
    result = original(cache)
    served = pipeline_of(cache)
    if served is not None:
        served.events()
    return result


def _reset(original: Callable[..., Any], cache: Any) -> Any:
    """A flush: end our prefetches before the host pool is cleared, and begin again after it."""
    had = pipeline_of(cache) is not None
    _drop(cache, give_back=False)
    result = original(cache)
    if had:
        attach(cache)
    return result


def _apply_runtime_config(original: Callable[..., Any], attachment: Any, **kwargs: Any) -> Any:
    result = original(attachment, **kwargs)
    attach(attachment._cache)
    return result


def _apply_policies(original: Callable[..., Any], attachment: Any, *args: Any, **kwargs: Any) -> Any:
    """A policy changed at run time (SGLang allows it while idle) takes effect on ours too."""
    result = original(attachment, *args, **kwargs)
    if pipeline_of(attachment._cache) is not None:
        attach(attachment._cache)
    return result


def _detach(original: Callable[..., Any], attachment: Any) -> Any:
    _drop(attachment._cache, give_back=True)
    return original(attachment)


def _run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if batch is not None and batch.forward_mode.is_extend() and _served:
        _prefills.append((time.monotonic(), int(getattr(batch, "extend_num_tokens", 0) or 0)))
    return original(scheduler, batch, *args, **kwargs)


def _process_batch_result(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The prefill rate for ``deadline``: from the launch of an extend batch until its result is there."""
    result = original(scheduler, batch, *args, **kwargs)
    if batch.forward_mode.is_extend() and _prefills:
        started, tokens = _prefills.popleft()
        for served in _served if tokens else ():
            served.pipeline.observe_prefill(tokens, started, time.monotonic())
    return result
