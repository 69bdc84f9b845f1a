"""Real SGLang caches in one process: pages are written once, then fetched by SGLang's pipeline and by ours.

python pipeline_controller_child.py JSON -> one JSON line a case. Run with tests/sglang_cpu/site on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from typing import Any

import torch

TASK = json.loads(sys.argv[1])
RANK, RANKS = int(os.environ.get("RANK", "0")), TASK.get("ranks", 1)
PAGE, PAGES, LAYERS, HEADS, DIM = 16, TASK.get("pages", 40), 2, 2, 32
DTYPE = torch.bfloat16

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402

from sglang_hicache_ext.sglang_adapter import pipeline_hook, storage  # noqa: E402
from sglang_hicache_ext.sglang_adapter.pipeline_hook import pipeline_of  # noqa: E402
from sglang_hicache_ext.testing.faults import FaultPlan, FaultyStore  # noqa: E402

SEQ = list(range(1, PAGES * PAGE + 1))
OPEN = storage.open_named_store


def build(pipeline: str, policy: str, faults: dict[str, Any] | None) -> tuple[Any, Any, Any]:
    storage.open_named_store = lambda name, config: (
        OPEN(name, config) if not faults else FaultyStore(OPEN(name, config), FaultPlan(**faults))
    )
    extra = {
        "backend_name": "nvme",
        "module_path": "sglang_hicache_ext.sglang_adapter.storage",
        "class_name": "HiCacheExtStorage",
        "interface_v1": 1,
        "path": TASK["path"],
        "capacity": "256MiB",
        "prefetch_threshold": PAGE,
        "pipeline": pipeline,
    }
    if policy == "deadline":
        extra |= {"prefetch_policy": "deadline", "prefill_tokens_per_s": 100.0}
    args = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        device="cpu",
        hicache_io_backend="direct",
        hicache_mem_layout=TASK.get("layout", "page_first_direct"),
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_ratio=2.0,
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_storage_prefetch_policy="timeout" if policy == "deadline" else policy,
        served_model_name="tiny",
    )
    set_global_server_args_for_scheduler(args)
    size = PAGE * (PAGES + 4)
    common = {"size": size, "page_size": PAGE, "dtype": DTYPE, "layer_num": LAYERS, "device": "cpu"}
    if TASK.get("mla"):
        pool: Any = MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=32, enable_memory_saver=False, **common)
    else:
        pool = MHATokenToKVPool(head_num=HEADS, head_dim=DIM, enable_memory_saver=False, **common)
    alloc = PagedTokenToKVPoolAllocator(
        size=size, page_size=PAGE, dtype=DTYPE, device="cpu", kvcache=pool, need_sort=False
    )
    params = CacheInitParams(
        req_to_token_pool=ReqToTokenPool(size=8, max_context_len=size, device="cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=alloc,
        page_size=PAGE,
        disable=False,
        tree_components=(ComponentType.FULL,),
        tp_cache_group=torch.distributed.group.WORLD,
    )
    cache = UnifiedRadixCache(params=params)
    cache.init_hicache(args, params)
    cache.load_back_threshold = 0
    cache.cache_controller.prefetch_capacity_limit = 1 << 40
    return cache, alloc, pool


def until(cache: Any, is_done: Any, what: str, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_done():
        cache.check_hicache_events()
        if time.monotonic() > end:
            raise SystemExit(f"not in time: {what}")
        time.sleep(0.001)


def rows(pool: Any, layer: int) -> list[Any]:
    return [pool.kv_buffer[layer]] if TASK.get("mla") else [pool.k_buffer[layer], pool.v_buffer[layer]]


def reference(like: Any, layer: int, part: int) -> Any:
    made = torch.randn((PAGES * PAGE, *like.shape[1:]), generator=torch.Generator().manual_seed(97 * layer + part))
    return made.to(DTYPE)


def key() -> Any:
    return RadixKey(array("q", SEQ))


def produce() -> None:
    cache, alloc, pool = build("sglang", "wait_complete", None)
    slots = alloc.alloc(PAGES * PAGE).to(torch.int64)
    for layer in range(LAYERS):
        for part, buffer in enumerate(rows(pool, layer)):
            buffer[slots] = reference(buffer, layer, part)
    cache.insert(InsertParams(key=key(), value=slots, prev_prefix_len=0))
    node = cache.match_prefix(MatchPrefixParams(key=key())).last_device_node
    until(
        cache,
        lambda: cache.tree_core.is_backuped(node) and not cache.ongoing_write_through and not cache.ongoing_backup,
        "backup",
    )
    cache.shutdown()
    cache.release_host_resources()


def bytes_are_right(cache: Any, pool: Any, tokens: int) -> bool:
    match = cache.match_prefix(MatchPrefixParams(key=key()))
    if match.host_hit_length != tokens or not cache.load_back(match.best_match_node):
        return False
    cache.ready_to_load_host_cache()
    cache.loading_check()
    match = cache.match_prefix(MatchPrefixParams(key=key()))
    slots = cache.path_device_indices(match.last_device_node)
    return len(slots) == tokens and all(
        torch.equal(buffer[slots].view(torch.int16), reference(buffer, layer, part)[:tokens].view(torch.int16))
        for layer in range(LAYERS)
        for part, buffer in enumerate(rows(pool, layer))
    )


def consume(case: dict[str, Any]) -> dict[str, Any]:
    cache, _, pool = build(
        case["pipeline"], case["policy"], case.get("faults") if case.get("faulty_rank", RANK) == RANK else None
    )
    host = cache.cache_controller.mem_pool_host
    free_before = host.available_size()
    handle = CacheRequestHandle("req", 0)
    cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", SEQ), None, None)
    started = time.monotonic()
    if case.get("abort"):
        cache.release_aborted_request(handle)
        loaded = 0
    else:
        if case["policy"] == "best_effort" and RANKS == 1:  # give it the time a queued request has
            until(cache, lambda: handle not in cache.ongoing_prefetch or time.monotonic() > started + 1.0, "settle")
        until(cache, lambda: cache.check_prefetch_progress(handle), "prefetch")
        loaded, start = cache.pop_prefetch_loaded_span(handle)
        assert not loaded or start == 0, start
    served = pipeline_of(cache)
    until(cache, lambda: served is None or served.pipeline.is_idle, "drained")
    if RANKS == 1:
        until(cache, cache.cache_controller.host_mem_release_queue.empty, "released")
    cache.check_hicache_events()
    result = {
        **case,
        "served": "extension" if served is not None else "sglang",
        "loaded": loaded,
        "host_used": free_before - host.available_size(),
        "right": loaded == 0 or bytes_are_right(cache, pool, loaded),
        "outcomes": {} if served is None else dict(served.pipeline.metrics.snapshot().outcomes),
        "hooked": sorted(pipeline_hook._installed),
        "ongoing": len(cache.ongoing_prefetch),
        "stats": {k: v for k, v in cache.prefetch_outcome_stats_snapshot().items() if v},
    }
    cache.sanity_check()
    if case.get("flush"):
        cache.reset()
        result["after_flush"] = [pipeline_of(cache) is not None, host.available_size() == free_before]
    result["detached"] = cache.detach_storage_backend()[0]
    result["dropped"] = pipeline_of(cache) is None
    cache.shutdown()
    cache.release_host_resources()
    return result


def main() -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{TASK['path']}.rendezvous", rank=RANK, world_size=RANKS
    )
    ranks = {"tp_rank": RANK, "tp_size": RANKS, "attn_tp_rank": RANK, "attn_tp_size": RANKS}
    with get_parallel().override(**ranks, moe_tp_rank=RANK, moe_tp_size=RANKS, pp_rank=0, pp_size=1):
        produce()
        for case in TASK["cases"]:
            print("CASE " + json.dumps(consume(case), default=str), flush=True)
    os._exit(0)


main()
