"""Our prefetch pipeline behind the calls of one UnifiedRadixCache. Scheduler thread, except where noted.

Insertion, host locks and the books of storage hits are SGLang's own functions, called as SGLang calls them.
Source: sglang 0.5.23 srt/mem_cache/unified_radix_cache.py:2080-2540, 2760-2830.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.budget import BudgetSettings
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.operation import PrefetchRequest, PrefetchResult, State
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.pipeline import Pipeline
from sglang_hicache_ext.pipeline_settings import PipelineSettings
from sglang_hicache_ext.policy import PolicySettings, make_policy
from sglang_hicache_ext.sglang_adapter.quarantine import quarantine_of

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0


def why_not(cache: Any, backend: Any) -> str:
    """Why SGLang's own path must serve this cache; "" when the pipeline can."""
    controller = cache.cache_controller
    group = controller.mem_pool_host
    channel = getattr(backend, "_channels", {}).get("kv")
    if cache.host_memory_mode != "cache":
        return f"host memory mode is {cache.host_memory_mode}"
    if cache.pp_size > 1:
        return "pipeline parallelism"
    if len(cache.tree_components) > 1 or len(group.entries) > 1:
        return "the model has pools beside KV"
    if channel is None or channel.pages is None or channel.pages.form != "regions":
        return "the host layout gives no page addresses"
    if _is_shared(group.anchor_entry.host_pool):
        return "the host pool is shared between ranks"
    return ""


def _is_shared(pool: Any) -> bool:
    from sglang.srt.mem_cache.pool_host.base import uses_shared_host_layout

    return bool(uses_shared_host_layout(pool))


class CacheRanks:
    """SGLang's gloo groups of the scheduler thread."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def min_many(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        import torch

        tensor = torch.from_numpy(values.copy())
        self._cache._all_reduce_attn_groups(tensor, torch.distributed.ReduceOp.MIN)
        result: NDArray[np.int64] = tensor.numpy()
        return result

    def min(self, value: int) -> int:
        return int(self.min_many(np.array([value], np.int64))[0])

    def max(self, value: int) -> int:
        return -self.min(-value)


class CacheHostPool:
    """SGLang's host pool in pages."""

    def __init__(self, bridge: CachePipeline, channel: Any) -> None:
        self._bridge, self._channel = bridge, channel
        self._group = bridge.cache.cache_controller.mem_pool_host
        self.page_tokens = int(bridge.cache.page_size)

    @property
    def total_pages(self) -> int:
        return int(self._group.anchor_entry.host_pool.size) // self.page_tokens

    @property
    def free_pages(self) -> int:
        return int(self._group.available_size()) // self.page_tokens

    def alloc(self, pages: int) -> NDArray[np.int64] | None:
        indices = self._group.alloc(pages * self.page_tokens)
        if indices is None:
            return None
        first = indices.cpu().numpy().reshape(pages, self.page_tokens)[:, 0]
        return np.asarray(first // self.page_tokens, np.int64)

    def free(self, pages: NDArray[np.int64]) -> None:
        self._group.free(self.tokens(pages))

    def reclaim(self, pages: int, unused_since: float) -> int:
        """Evict as SGLang does, oldest first, but nothing that another prefetch brought and nobody used yet."""
        with self._bridge.unused_results_locked():
            return int(self._bridge.cache.evict_host(pages * self.page_tokens)) // self.page_tokens

    def regions(self, pages: NDArray[np.int64]) -> Regions:
        regions: Regions = self._channel.pages.for_read(pages * self.page_tokens)
        return regions

    def tokens(self, pages: NDArray[np.int64]) -> Any:
        """Token slots of ``pages`` as an int64 tensor."""
        import torch

        slots = pages[:, None] * self.page_tokens + np.arange(self.page_tokens, dtype=np.int64)
        return torch.from_numpy(slots.reshape(-1).astype(np.int64, copy=False))


@dataclass(slots=True, eq=False)
class _Lock:
    """Host lock on a tree node for a with block; a node that is gone needs none."""

    cache: Any
    nodes: Sequence[Any]

    def __enter__(self) -> None:
        self.held: list[tuple[Any, Any]] = []
        for node in self.nodes:
            try:
                self.held.append((node, self.cache.inc_host_lock_ref(node).to_dec_params()))
            except Exception as error:
                logger.debug("node %s is gone: %s", node, error)

    def __exit__(self, *_: object) -> None:
        for node, params in self.held:
            self.cache.dec_host_lock_ref(node, params)

    held: list[tuple[Any, Any]] = None  # type: ignore[assignment]


class CachePipeline:
    """One cache's pipeline, from attach to detach or flush."""

    def __init__(self, cache: Any, backend: Any, config: HiCacheExtConfig) -> None:
        self.cache, self.backend = cache, backend
        self._channel = backend._channels["kv"]
        self._page = int(cache.page_size)
        self._unused: dict[Any, Any] = {}
        self._blocked_since: dict[Any, float] = {}
        self.policy = config.prefetch_policy or cache.prefetch_stop_policy
        numbers = PolicySettings(
            page_tokens=self._page,
            timeout_base_s=float(cache.prefetch_timeout_base),
            timeout_per_ki_token_s=float(cache.prefetch_timeout_per_page) * 1024 / self._page,
            wait_complete_cap_s=config.wait_complete_cap_s,
        )
        threshold = max(int(cache.prefetch_threshold), self._page)
        settings = PipelineSettings(
            BudgetSettings(page_tokens=self._page, threshold_tokens=threshold),
            io_workers=config.io_workers,
            read_deadline_s=config.read_deadline_s,
            hold_s=config.hold_s,
            stall_limit_s=3 * config.read_deadline_s,
            prefill_tokens_per_s=config.prefill_tokens_per_s,
        )
        self.pool = CacheHostPool(self, self._channel)
        self.pipeline = Pipeline(
            backend.store, self._channel.namespace, self.pool, self, make_policy(self.policy, numbers), settings,
            sync=CacheRanks(cache), metrics=backend.metrics,
        )  # fmt: skip

    # -- SGLang's calls ---------------------------------------------------------------------------------------------

    def prefetch(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: Any = None,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """``prefetch_from_storage``."""
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_radix_cache import _OngoingPrefetch
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        cache, stats = self.cache, self.cache._prefetch_outcome_stats
        cache.storage_prefetch_retries.cancel(request.rid)
        if request in cache.ongoing_prefetch:
            return
        key = RadixKey(
            new_input_tokens, extra_key=extra_key, is_bigram=cache.tree_core.is_eagle, cache_salt=cache_salt
        ).page_aligned(self._page)
        if len(key) > 0:
            stats["attempts"] += 1
        operation = PrefetchOperation(request, key, last_hash, prefix_keys)
        operation.stats_requested_tokens = len(key)
        operation.storage_start = len(matched_prefix_tokens or ())
        declined = self.pipeline.submit(
            PrefetchRequest(
                request,
                len(key) // self._page,
                lambda: get_storage_hash_str(key, last_hash, page_size=self._page),
                anchor=(request, last_host_node_id, key, operation),
                ns=self._channel.namespace,
                first_blocked_at=self._blocked_since.get(request),
            )
        )
        if declined is not None:
            self._count_decline(request, declined, len(key), storage_hit_end)
            return
        stats["issued"] += 1
        lock = cache.inc_host_lock_ref(last_host_node_id).to_dec_params()
        cache.ongoing_prefetch[request] = _OngoingPrefetch(last_host_node_id, key, None, operation, lock, {})

    def _count_decline(self, request: Any, reason: Outcome, tokens: int, storage_hit_end: int | None) -> None:
        stats = self.cache._prefetch_outcome_stats
        if reason is Outcome.BELOW_THRESHOLD:
            stats["declined_too_short"] += int(tokens > 0)
        else:
            stats["declined_rate_limited"] += 1
            self.cache.storage_prefetch_retries.poll_miss(request.rid, storage_hit_end)

    def check(self, request: Any) -> bool:
        """``check_prefetch_progress``."""
        if request not in self.cache.ongoing_prefetch:
            return True
        poll = self.pipeline.poll(request)
        if not poll.is_ready:
            self._blocked_since.setdefault(request, time.monotonic())
            return False
        self._finalize(request, poll.result)
        return True

    def events(self) -> None:
        """The tail of ``check_hicache_events``."""
        self.pipeline.pump()
        for request in [r for r in self.cache.ongoing_prefetch if not self.pipeline.has(r)]:
            self._finalize(request, self.pipeline.poll(request).result)
        if self._blocked_since:
            retries = self.cache.storage_prefetch_retries._pending
            alive = self.cache.ongoing_prefetch
            self._blocked_since = {r: t for r, t in self._blocked_since.items() if r in alive or r.rid in retries}

    def abort(self, request: Any) -> None:
        """The head of ``release_aborted_request``."""
        if self.pipeline.abort(request):
            self._retire(request)
        self._unused.pop(request, None)

    def close(self, *, give_back: bool) -> None:
        """End everything, bounded. Pages that a stuck read may still write to go into quarantine.

        ``give_back``: the pool lives on (detach), so quarantined pages return to it once they are safe.
        """
        for request in list(self.cache.ongoing_prefetch):
            self.abort(request)
        stuck = self.pipeline.close(_CLOSE_S)
        quarantine = quarantine_of(self._channel.pool, self._page)
        for pages, drain in self.pipeline.withheld():
            quarantine.hold(pages * self._page, drain)
            if give_back:
                self.pool.free(pages)
        if stuck:
            logger.error("sglang-hicache-ext: prefetch reads are stuck: %s", "; ".join(stuck))

    # -- the end of a prefetch --------------------------------------------------------------------------------------

    def insert_host(self, anchor: Any, pages: NDArray[np.int64], hashes: Sequence[str]) -> int:
        """Insert as ``_handle_prefetch_result`` does; returns the pages that the tree already had."""
        from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase

        request, node, key, operation = anchor
        cache, done = self.cache, len(pages)
        result = cache.tree_core.insert_host(node, key[: done * self._page], self.pool.tokens(pages), list(hashes))
        cache._apply_cache_actions(result.cache_actions)
        if result.host_insert_dropped:
            return done
        actions: list[Any] = []
        cache.tree_core.commit_hicache_transfers(
            node,
            CacheTransferPhase.PREFETCH,
            {},
            cache_actions=actions,
            insert_result=result,
            pool_storage_result=operation.pool_storage_result,
        )
        cache._apply_cache_actions(actions)
        if result.inserted_host_node is not None:
            self._unused[request] = result.inserted_host_node
        return int(result.prefix_len) // self._page

    def unused_results_locked(self) -> _Lock:
        """Keep what prefetches brought for requests that have not used it yet from being evicted."""
        waiting = self.cache.prefetch_loaded_tokens_by_reqid
        self._unused = {request: node for request, node in self._unused.items() if request in waiting}
        return _Lock(self.cache, list(self._unused.values()))

    def _retire(self, request: Any) -> Any:
        info = self.cache.ongoing_prefetch.pop(request)
        self.cache.dec_host_lock_ref(info.anchor_node_id, info.anchor_lock_params)
        return info

    def _finalize(self, request: Any, result: PrefetchResult | None) -> None:
        operation = self._retire(request).operation
        cache = self.cache
        cache.prefetch_loaded_tokens_by_reqid[request] = 0
        cache.prefetch_loaded_storage_start_by_reqid.pop(request, None)
        if result is None:
            return
        self._account(request, operation, result)
        if result.loaded_pages > 0:
            cache.prefetch_loaded_tokens_by_reqid[request] = result.loaded_pages * self._page
            start = operation.storage_start + result.matched_pages * self._page
            cache.prefetch_loaded_storage_start_by_reqid[request] = start
        if self._is_worth_a_retry(result):
            cache.storage_prefetch_retries.poll_miss(request.rid)

    def _is_worth_a_retry(self, result: PrefetchResult) -> bool:
        """As SGLang: a miss may have been written meanwhile, host pages may be free; a deadline is final."""
        if result.state is State.MISSED or result.outcomes[Outcome.RATE_LIMITED]:
            return True
        if result.completed_pages:
            return False
        return bool(result.outcomes[Outcome.NO_HOST_PAGES]) or self.policy == "best_effort"

    def _account(self, request: Any, operation: Any, result: PrefetchResult) -> None:
        cache, page, done = self.cache, self._page, result.completed_pages
        operation.storage_hit_count = result.hit_pages * page
        cache._account_prefetch_outcome(operation, revoked=result.state is State.MISSED)
        if not result.hit_pages:
            return
        cache._record_storage_prefetch_hit(request, result.hit_pages * page)
        reason = self._why_unfulfilled(result)
        cache._resolve_storage_prefetch_tokens(request, (result.hit_pages - done) * page, reason=reason)
        cache._resolve_storage_prefetch_tokens(request, result.matched_pages * page)
        if done and cache.enable_storage_metrics and cache.storage_metrics_collector is not None:
            cache.storage_metrics_collector.log_prefetched_tokens(done * page)

    @staticmethod
    def _why_unfulfilled(result: PrefetchResult) -> str:
        """SGLang's label for the tokens of a hit that were not loaded."""
        if result.state is State.MISSED:
            return "below_threshold"
        if result.outcomes[Outcome.NO_HOST_PAGES] or result.outcomes[Outcome.RATE_LIMITED]:
            return "host_capacity"
        return "deadline" if result.state is State.STOPPED else "storage_transfer"
