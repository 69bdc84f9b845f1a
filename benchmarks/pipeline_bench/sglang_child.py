"""Real SGLang caches over one NVMe store, driven by commands on standard input; one JSON line answers each.

The arms differ in the pipeline only: the same UnifiedRadixCache, host pool, store and poll loop.
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
PAGE, LAYERS, HEADS, DIM = 16, 4, 4, 64
DTYPE = torch.bfloat16
LARGE, SMALL, COUNT = TASK["large_pages"], TASK["small_pages"], TASK["small_requests"]
TOTAL = LARGE + SMALL * COUNT

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402

from sglang_hicache_ext.sglang_adapter.pipeline_hook import pipeline_of  # noqa: E402


def build(pipeline: str) -> Any:
    extra = {
        "backend_name": "nvme",
        "module_path": "sglang_hicache_ext.sglang_adapter.storage",
        "class_name": "HiCacheExtStorage",
        "interface_v1": 1,
        "path": TASK["path"],
        "capacity": TASK["capacity"],
        "prefetch_threshold": PAGE,
        "pipeline": pipeline,
    }
    args = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        device="cpu",
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_storage_backend="dynamic",
        hicache_ratio=2.2,
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_storage_prefetch_policy="wait_complete",
        served_model_name="tiny",
    )
    set_global_server_args_for_scheduler(args)
    size = PAGE * (TOTAL + 64)
    pool = MHATokenToKVPool(
        size=size,
        page_size=PAGE,
        dtype=DTYPE,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    params = CacheInitParams(
        req_to_token_pool=ReqToTokenPool(size=8, max_context_len=size, device="cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(
            size=size, page_size=PAGE, dtype=DTYPE, device="cpu", kvcache=pool, need_sort=False
        ),
        page_size=PAGE,
        disable=False,
        tree_components=(ComponentType.FULL,),
        tp_cache_group=torch.distributed.group.WORLD,
    )
    cache = UnifiedRadixCache(params=params)
    cache.init_hicache(args, params)
    cache.cache_controller.prefetch_capacity_limit = 1 << 40
    assert (pipeline_of(cache) is not None) == (pipeline == "extension")
    return cache


def prompts() -> list[tuple[str, list[int]]]:
    """The large request first, then the small ones; none shares a page with another."""
    sizes = [LARGE] + [SMALL] * COUNT
    starts = [sum(sizes[:i]) * PAGE + 1 for i in range(len(sizes))]
    return [(f"r{i}", list(range(s, s + n * PAGE))) for i, (s, n) in enumerate(zip(starts, sizes, strict=True))]


def host_buffer(cache: Any) -> Any:
    return cache.cache_controller.mem_pool_host.anchor_entry.host_pool.kv_buffer


def fill(cache: Any) -> dict[str, Any]:
    """Write every page through the backend, 128 at a time; each page holds its own random bytes."""
    backend, host = cache.cache_controller.storage_backend, cache.cache_controller.mem_pool_host
    raw = host_buffer(cache).view(torch.int16)
    slots = host.alloc(128 * PAGE)
    written = 0
    for _, tokens in prompts():
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        for at in range(0, len(hashes), 128):
            part = hashes[at : at + 128]
            pages = slots[: len(part) * PAGE : PAGE] // PAGE
            for name, page in zip(part, pages.tolist(), strict=True):
                raw[:, page] = int(name[:4], 16) - 32768
            written += sum(backend.batch_set_v1(part, slots[: len(part) * PAGE]))
    host.free(slots)
    backend.store.flush(60.0)
    page_bytes = raw[0, 0].numel() * raw.element_size() * 2
    return {"written": written, "total": TOTAL, "page_bytes": page_bytes, "store": backend.store.describe()}


def run(cache: Any) -> dict[str, Any]:
    """Submit everything, poll as a scheduler does, note when each request may start."""
    host_buffer(cache).view(torch.int16)[:, :, 0, 0, 0, 0] = 0
    requests = {CacheRequestHandle(name, 0): tokens for name, tokens in prompts()}
    started = time.perf_counter()
    for handle, tokens in requests.items():
        cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", tokens), None, None)
    done: dict[Any, float] = {}
    loaded = 0
    while len(done) < len(requests):
        cache.check_hicache_events()
        for handle in requests:
            if handle not in done and cache.check_prefetch_progress(handle):
                done[handle] = time.perf_counter() - started
                loaded += cache.pop_prefetch_loaded_tokens(handle)
        if time.perf_counter() - started > 120:
            raise SystemExit("not done in 120 s")
        time.sleep(0.0005)
    times = [done[h] for h in requests]
    wrong = check_bytes(cache, requests)
    cache.evict_host(TOTAL * PAGE)
    return {"large_s": times[0], "small_s": times[1:], "total_s": max(times), "pages": loaded // PAGE, "wrong": wrong}


def check_bytes(cache: Any, requests: dict[Any, list[int]]) -> int:
    """Count requests that miss pages in the host tree, and sampled pages whose bytes came nowhere in the pool."""
    raw = host_buffer(cache).view(torch.int16)
    wrong = 0
    for tokens in requests.values():
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        wrong += int(match.host_hit_length != len(tokens))
        values = {int(v) for v in torch.unique(raw[:, :, 0, 0, 0, 0]).tolist()}
        wrong += sum(int(name[:4], 16) - 32768 not in values for name in hashes[::97])
    return wrong


def main() -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{TASK['path']}.rendezvous", rank=0, world_size=1)
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        caches = {"sglang": build("sglang")}
        print("ANSWER " + json.dumps(fill(caches["sglang"]), default=str), flush=True)
        caches["extension"] = build("extension")
        for line in sys.stdin:
            print("ANSWER " + json.dumps(run(caches[line.strip()])), flush=True)
    os._exit(0)


main()
