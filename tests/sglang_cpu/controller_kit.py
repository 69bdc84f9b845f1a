"""SGLang's real tree, hybrid controller, storage threads and host pools in one process on the CPU.

Call ``start()`` once per process, then build any number of ``Node``: what one node writes behind, a new one prefetches,
inserts and loads back. Import after ``site/cpu_kit.install()``.
"""

import itertools
import json
import os
import tempfile
import time
from array import array
from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_full_draft_pools
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

LAYERS, HEADS, HEAD_DIM, DTYPE = 4, 2, 64, torch.bfloat16
WAIT_S = 30.0

_requests = itertools.count()
_kept = []


@dataclass(frozen=True)
class Shape:
    """What a node serves. ``pool``: mha, asymmetric, mla or dsa; ``draft``: an MHA draft pool beside it."""

    pool: str = "mha"
    layout: str = "page_first"
    page_tokens: int = 16
    pages: int = 6
    draft: bool = False

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens


def start():
    """A gloo group of one and SGLang's parallel state; once per process."""
    if _kept:
        return
    rendezvous = os.path.join(tempfile.mkdtemp(), "gloo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    state = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    state.__enter__()
    _kept.append(state)  # the state is undone when it is collected


def until(condition, what, each=lambda: None, wait_s=WAIT_S):
    """Run ``each`` until ``condition``; fail after ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    while not condition():
        each()
        if condition():
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"still waiting for {what} after {wait_s} s")
        time.sleep(0.002)


def _device_pool(shape: Shape, size: int):
    common = {"size": size, "page_size": shape.page_tokens, "dtype": DTYPE, "layer_num": LAYERS, "device": "cpu"}
    if shape.pool == "mla":
        return MLATokenToKVPool(**common, kv_lora_rank=64, qk_rope_head_dim=32, enable_memory_saver=False)
    if shape.pool == "dsa":
        return DSATokenToKVPool(
            **common,
            kv_lora_rank=64,
            qk_rope_head_dim=32,
            index_head_dim=128,
            kv_cache_dim=96,
            enable_memory_saver=False,
        )
    v_dim = {"v_head_dim": HEAD_DIM // 2} if shape.pool == "asymmetric" else {}
    return MHATokenToKVPool(**common, head_num=HEADS, head_dim=HEAD_DIM, enable_memory_saver=False, **v_dim)


class Node:
    """One scheduler's cache: device pool, host pool, tree, controller, storage backend.

    Args:
        backend: SGLang's ``--hicache-storage-backend``; None attaches nothing.
        extra: the extra config as an object.
        kv_events: SGLang's ``--kv-events-config``; its tree then records events.
    """

    def __init__(self, shape: Shape, backend=None, extra=None, policy="wait_complete", kv_events=None):
        self.shape, self.backend, self.extra = shape, backend, {"prefetch_threshold": 1, **(extra or {})}
        size = max(256, shape.page_tokens * (shape.pages + 4))
        args = ServerArgs(
            model_path="dummy",
            page_size=shape.page_tokens,
            device="cpu",
            hicache_io_backend="kernel" if shape.layout == "page_first" else "direct",
            hicache_mem_layout=shape.layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=backend,
            hicache_ratio=2.0,
            hicache_storage_backend_extra_config=json.dumps(self.extra) if backend else None,
            hicache_storage_prefetch_policy=policy,
            served_model_name="tiny",
            kv_events_config=kv_events,
        )
        set_global_server_args_for_scheduler(args)
        self.pool = _device_pool(shape, size)
        self.allocator = self._allocator(size)
        requests = ReqToTokenPool(size=8, max_context_len=size, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=shape.page_tokens,
            disable=False,
            tree_components=(ComponentType.FULL,),
            tp_cache_group=torch.distributed.group.WORLD,
            enable_kv_cache_events=kv_events is not None,
        )
        self.tree = UnifiedRadixCache(params=params)
        self.tree.init_hicache(args, params)
        self.tree.load_back_threshold = 0
        self._lift_prefetch_limit()
        self.draft = self._add_draft(size) if shape.draft else None

    def _add_draft(self, size):
        """Register a draft pool as SGLang does for speculative decoding: a side pool that follows the KV pages."""
        pool = MHATokenToKVPool(
            size=size,
            page_size=self.shape.page_tokens,
            dtype=DTYPE,
            layer_num=1,
            device="cpu",
            head_num=1,
            head_dim=HEAD_DIM,
            enable_memory_saver=False,
        )
        specs, entries = build_full_draft_pools(draft_kv_pool=pool, tree_cache=self.tree)
        for spec, entry in zip(specs, entries, strict=True):
            self.tree.register_sidecar_pool(spec, entry)
        return pool

    def _lift_prefetch_limit(self):
        controller = self.controller
        if self.backend:
            controller.prefetch_capacity_limit = controller.mem_pool_host.size

    def _allocator(self, size):
        common = {"size": size, "dtype": DTYPE, "device": "cpu", "kvcache": self.pool, "need_sort": False}
        if self.shape.page_tokens == 1:
            return TokenToKVPoolAllocator(**common)
        return PagedTokenToKVPoolAllocator(**common, page_size=self.shape.page_tokens)

    @property
    def controller(self):
        return self.tree.cache_controller

    @property
    def storage(self):
        return self.controller.storage_backend

    @property
    def host_pool(self):
        return self.controller.storage_host_pool

    def key(self, tokens):
        return RadixKey(array("q", tokens))

    def match(self, tokens):
        return self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens)))

    def buffers(self, slots):
        """Every device buffer with the rows that hold tokens ``slots``."""
        if self.shape.pool in ("mla", "dsa"):
            found = [(b, slots) for b in self.pool.kv_buffer]
        else:
            found = [(b, slots) for b in [*self.pool.k_buffer, *self.pool.v_buffer]]
        if self.draft is not None:
            found += [(b, slots) for b in [*self.draft.k_buffer, *self.draft.v_buffer]]
        if self.shape.pool == "dsa":
            pages = slots.reshape(-1, self.shape.page_tokens)[:, 0] // self.shape.page_tokens
            found += [(b, pages) for b in self.pool.index_k_with_scale_buffer]
        return found

    def produce(self, tokens, seed=0):
        """Fill device rows with bytes made from ``seed``, insert them, wait until host and storage have them."""
        slots = self.allocator.alloc(len(tokens)).to(torch.int64)
        for number, (buffer, rows) in enumerate(self.buffers(slots)):
            buffer[rows] = random_like(buffer, len(rows), seed, number)
        self.tree.insert(InsertParams(key=self.key(tokens), value=slots, prev_prefix_len=0))
        node = self.match(tokens).last_device_node
        until(lambda: self.is_backed_up(node), "the backup", self.tree.check_hicache_events)
        return node

    def is_backed_up(self, node):
        tree = self.tree
        is_idle = not tree.ongoing_write_through and not tree.ongoing_backup
        return tree.tree_core.is_backuped(node) and is_idle and self.controller.backup_queue.empty()

    def prefetch(self, tokens):
        """Prefetch from storage; returns tokens loaded into the host pool."""
        handle = CacheRequestHandle(f"request-{next(_requests)}", 0)
        self.tree.prefetch_from_storage(handle, self.tree.root_node_handle(), array("q", tokens), None, None)
        done = []

        def step():
            self.tree.check_hicache_events()
            if not done and self.tree.check_prefetch_progress(handle):
                done.append(True)

        until(lambda: bool(done), "the prefetch", step)
        until(lambda: not self.tree.ongoing_prefetch, "the end of the prefetch", self.tree.check_hicache_events)
        return self.tree.pop_prefetch_loaded_tokens(handle)

    def differing_buffers(self, tokens, seed=0, produced=None):
        """Load ``tokens`` from host to device; returns the numbers of buffers whose bytes are not those of ``seed``.

        Args:
            produced: how many tokens ``produce`` got, when ``tokens`` is a prefix of them.
        """
        match = self.match(tokens)
        assert match.host_hit_length == len(tokens), (match.host_hit_length, len(tokens))
        assert self.tree.load_back(match.best_match_node)
        assert self.tree.ready_to_load_host_cache() != -1
        self.tree.loading_check()
        slots = self.tree.path_device_indices(self.match(tokens).last_device_node)
        assert len(slots) == len(tokens)
        differing = []
        for number, (buffer, rows) in enumerate(self.buffers(slots)):
            all_rows = len(rows) * (produced or len(tokens)) // len(tokens)
            expected = random_like(buffer, all_rows, seed, number)[: len(rows)]
            if not torch.equal(as_bytes(buffer[rows]), as_bytes(expected)):
                differing.append(number)
        return differing

    def attach(self):
        reply = self.tree.attach_storage_backend(
            storage_backend=self.backend, storage_backend_extra_config_json=json.dumps(self.extra)
        )
        self._lift_prefetch_limit()
        return reply

    def close(self):
        self.tree.sanity_check()
        self.tree.shutdown()
        self.tree.release_host_resources()


def random_like(buffer, rows, seed, number):
    """[rows, ...] bytes that depend on ``seed`` and the number of the buffer only; every bit pattern may occur."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    shape = (rows, *buffer.shape[1:-1], buffer.shape[-1] * buffer.dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(buffer.dtype)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)
