"""Joins a manager to its scheduler: what it needs to know of the pool, and what it asks of the queues."""

from __future__ import annotations

import logging
import math
from typing import Any

from sglang_hicache_ext.pd.groups import GroupPlanner
from sglang_hicache_ext.sglang_adapter import pd_geometry
from sglang_hicache_ext.sglang_adapter.pd_layers import LayeredForwards
from sglang_hicache_ext.sglang_adapter.pd_promise import Promises

logger = logging.getLogger(__name__)

PROMISE_S = 20.0
"""Seconds a decode node's load from L3 may take before prefill sends what it was to bring."""


def join_prefill(manager: Any, queue: Any) -> None:
    """After SGLang made the manager of a prefill rank. Scheduler thread, at start."""
    _join(manager, queue)
    scheduler, endpoint = queue.scheduler, manager.sending.endpoint
    manager.pages_of = lambda sender, start, pages: _pages_of(scheduler, sender, start, pages)
    planner = GroupPlanner(endpoint.geometry, manager.settings)
    layered = LayeredForwards(
        scheduler, queue.token_to_kv_pool, endpoint, lambda pages: len(planner.plan(pages, layered=True)) > 1
    )
    hidden = layered.attach()
    if hidden:
        logger.info("sglang-hicache-ext PD: no layer groups, every chunk goes whole: %s", hidden)
    else:
        manager.sending.layered = layered
        logger.info(
            "sglang-hicache-ext PD: %s over %s, chunks of %d pages or more go layer group by layer group",
            manager.settings.transport, manager.local_ip, _least(planner),
        )  # fmt: skip


def _least(planner: GroupPlanner) -> int:
    """Pages from which a chunk is cut into layer groups; 0 when none ever is."""
    sizes = (1 << i for i in range(20))
    return next((n for n in sizes if len(planner.plan(n, layered=True)) > 1), 0)


def _pages_of(scheduler: Any, sender: Any, start: int, pages: int) -> Any:
    """Page ids of the request that ``sender`` sends, from token ``start`` on; None when it is not in flight."""
    size = scheduler.token_to_kv_pool_allocator.page_size
    for req in scheduler.disagg_prefill_inflight_queue:
        if req.disagg_kv_sender is sender and req.kv.req_pool_idx is not None:
            slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start : start + pages * size]
            slots = scheduler.token_to_kv_pool_allocator.translate_kv_indices_for_transfer(slots)
            return (slots[::size] // size).cpu().numpy().astype("int64")
    return None


def join_decode(manager: Any, queue: Any) -> None:
    """After SGLang made the manager of a decode rank. Scheduler thread, at start."""
    _join(manager, queue)
    transfers = queue.transfer_queue
    # SGLang frees the pages of a failed transfer after a time, whoever may still write to them. Here they wait for proof.
    transfers.enable_deferred_kv_release = True
    transfers.deferred_kv_release_timeout = math.inf
    if queue.scheduler.enable_decode_hicache:
        fixed = Promises(queue, manager, PROMISE_S).attach()
        if fixed:
            logger.info("sglang-hicache-ext PD: a prefix that cannot be loaded fails its request: %s", fixed)


def _join(manager: Any, queue: Any) -> None:
    scheduler = queue.scheduler
    config = scheduler.model_config.hf_config
    model = ",".join(getattr(config, "architectures", None) or ["unknown"])
    pool = queue.token_to_kv_pool
    facts = pd_geometry.facts_of(manager, model)
    facts["kv_dtype"] = str(
        getattr(pool, "dtype", "unknown")
    )  # SGLang's own fact says "auto" for whatever the model has
    manager.join(pd_geometry.geometry_of(manager.kv_args, pool, facts, _device_of(pool)))


def _device_of(pool: Any) -> int:
    """CUDA device of the pool's memory, -1 for host memory."""
    import torch

    device = torch.device(pool.device)
    if device.type == "cpu":
        return -1
    return device.index if device.index is not None else torch.cuda.current_device()
