"""A prefix that the decode side promises to take from its own tiers, kept or withdrawn before prefill lets go of it.

SGLang tells prefill to send only what lies behind the prefix found in L1, L2 and L3 of the decode node, and fails the
request when that prefix then cannot be loaded. Here prefill holds the request until it hears that the load went well. When
it did not, the decode side gives the promise back: it takes pages of its own for the missing part, and prefill sends them.

Source: sglang 0.5.23 srt/disaggregation/decode_hicache_mixin.py:194-349, srt/disaggregation/decode.py:1584-1850,2833-2842.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_hicache_ext.metrics import Metrics

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often a shorter promise is tried before the rest is asked of prefill."""


class Promises:
    """Scheduler thread of a decode rank.

    Args:
        queue: SGLang's DecodePreallocQueue.
        manager: the transfer manager, joined.
        limit_s: seconds a load from L3 may take before its promise is given back.
    """

    def __init__(self, queue: Any, manager: Any, limit_s: float) -> None:
        self._queue, self._transfers, self._cache = queue, queue.transfer_queue, queue.tree_cache
        self._metrics: Metrics = manager.metrics
        self._states = [str(getattr(s, "value", s)) for s in manager.kv_args.state_types]
        self._limit_s = limit_s
        self._page = int(queue.token_to_kv_pool_allocator.page_size)

    def attach(self) -> str:
        """Wrap the two methods of SGLang that make and settle promises; "" or why promises cannot be given back here."""
        if self._states:
            return f"this model has state beside its KV ({', '.join(self._states)})"
        self._wrap(self._queue, "_send_kv_metadata", self._mark)
        self._wrap(self._transfers, "_process_hicache_local_restores", self._settle)
        return ""

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def _mark(self, original: Callable[..., Any], dr: Any, *args: Any, **kwargs: Any) -> Any:
        """The metadata that goes out now carries a promise where a part of the prefix is not on the device yet."""
        match = dr.prefix_match
        dr.kv_receiver.is_promise = match is not None and match.needs_local_restore
        dr.kv_receiver.promised_at = time.monotonic()
        return original(dr, *args, **kwargs)

    def _settle(self, original: Callable[..., Any], requests: list[Any]) -> None:
        original(requests)
        broken = self._agreed([int(self._is_broken(dr)) for dr in requests])
        for dr, bad in zip(requests, broken, strict=True):
            if bad:
                self._give_back(dr)
            elif getattr(dr.kv_receiver, "is_promise", False) and self._is_loaded(dr):
                dr.kv_receiver.tell_kept()

    def _agreed(self, flags: list[int]) -> list[int]:
        """What fails on one rank fails on all: they take and free pages in step."""
        import torch
        from sglang.srt.disaggregation.utils import all_reduce_flags

        found: list[int] = all_reduce_flags(flags, self._transfers.gloo_group, torch.distributed.ReduceOp.MAX)
        return found

    def _is_broken(self, dr: Any) -> bool:
        if not getattr(dr.kv_receiver, "is_promise", False):
            return False
        if dr.hicache_restore_status.value == "failed":
            return True
        waits = dr.hicache_restore_status.value == "pending" and dr.hicache_load_consumer_index < 0
        return bool(waits and time.monotonic() - dr.kv_receiver.promised_at > self._limit_s)

    def _is_loaded(self, dr: Any) -> bool:
        """Its pages are on the device, or the copies that bring them are queued; both cannot fail any more."""
        return bool(dr.hicache_restore_status.value == "ready" or dr.hicache_load_consumer_index >= 0)

    # ------------------------------------------------------------------------------------- giving back

    def _give_back(self, dr: Any) -> None:
        """Shorten the promise to what can be loaded, and ask prefill for the rest. Leaves the request to SGLang (which
        fails it) only when no pages are left."""
        from sglang.srt.disaggregation.decode_hicache_mixin import HiCacheRestoreResult
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

        match = dr.prefix_match
        self._cache.finish(dr.req.cache_request_handle, CacheRequestOutcome.ABORT)
        self._cache.unlock(dr.hicache_restore_lock)
        dr.hicache_restore_lock, dr.hicache_restored_kv_indices = None, None
        dr.hicache_load_consumer_index = -1
        keep, promised = self._loadable(dr), match.decode_prefix_len
        if not self._take_pages(dr, keep, promised):
            dr.hicache_restore_status = HiCacheRestoreResult.FAILED
            logger.warning("room %s: no pages for a prefix that could not be loaded", dr.req.bootstrap_room)
            return
        match.prefetch_registered = False
        match.l3_storage_hit_length = 0
        match.l2_host_hit_length = keep - match.l1_prefix_len
        dr.hicache_restore_status = HiCacheRestoreResult.PENDING
        dr.kv_receiver.promised_at = time.monotonic()
        self._metrics.add("pd_promises_withdrawn")
        self._metrics.add("pd_promised_tokens_withdrawn", promised - keep)
        logger.warning(
            "room %s: %d of %d promised tokens could not be loaded; prefill sends them",
            dr.req.bootstrap_room, promised - keep, promised,
        )  # fmt: skip

    def _loadable(self, dr: Any) -> int:
        """Tokens from the start that L1 and L2 hold now; what L1 holds, after a second failure or with several ranks."""
        from sglang.srt.disaggregation.decode_hicache_mixin import _bigram_boundary_tokens
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.common import _req_radix_key

        match, receiver = dr.prefix_match, dr.kv_receiver
        if receiver.attempts >= ATTEMPTS - 1 or receiver.kv_mgr.attn_tp_size > 1:
            return int(match.l1_prefix_len)
        receiver.attempts += 1
        wanted = match.decode_prefix_len + _bigram_boundary_tokens(self._cache)
        key = _req_radix_key(self._cache, dr.req, dr.req.origin_input_ids, wanted)
        found = self._cache.match_prefix(MatchPrefixParams(key=key, cow_mamba=False, req=dr.req))
        here = int(found.device_prefix_len + found.host_hit_length) // self._page * self._page
        return max(int(match.l1_prefix_len), min(here, int(match.decode_prefix_len)))

    def _take_pages(self, dr: Any, start: int, stop: int) -> bool:
        """Give the request pages for tokens [start, stop) and have prefill fill them."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        need, allocator = stop - start, self._queue.token_to_kv_pool_allocator
        if need <= 0:
            return True
        if allocator.available_size() < need:
            self._cache.evict_for_alloc(EvictParams(num_tokens=need - allocator.available_size()))
        slots = allocator.alloc(need)
        if slots is None:
            return False
        self._queue.req_to_token_pool.write((dr.req.kv.req_pool_idx, slice(start, stop)), slots)
        dr.req.kv.cache_protected_len = start
        pages = (slots[:: self._page] // self._page).cpu().numpy().astype(np.int64)
        dr.kv_receiver.ask_for_rest(start, pages)
        return True
