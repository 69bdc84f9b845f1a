"""One prefill node: arrivals, prefetch, admission under a policy, prefill, write-through.

The order of steps is SGLang's: prefetch is submitted on arrival, the hit query allocates host pages, I/O fills them
batch by batch, and the policy is asked only when the scheduler considers the request, so a wait costs
nothing while the server is busy with others.

Source: sglang 0.5.23 srt/managers/scheduler.py:4240-4247, srt/mem_cache/unified_radix_cache.py:2080-2516.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hicache_ext.policy import Policy, PolicySettings, make_policy
from sglang_hicache_ext.testing.latency import LatencyModel
from simulator.cache import LruPages
from simulator.fetch import Fetch, FetchQueue
from simulator.loop import EventLoop
from simulator.results import RunColumns
from simulator.spec import NodeSpec
from simulator.storage import LocalStorage, Storage
from simulator.trace import Load, Request

MAX_RETRIES = 8
"""Attempts of a declined prefetch. Source: sglang 0.5.23 srt/mem_cache/storage_prefetch.py:43-78."""


@dataclass(slots=True, eq=False)
class _Waiting:
    index: int
    request: Request
    fetch: Fetch | None = None
    is_declined: bool = False
    retries: int = 0


class Node:
    """A node in an event loop. ``arrive`` takes requests; ``columns`` fill as they finish."""

    def __init__(self, loop: EventLoop, spec: NodeSpec, page_tokens: int, policy: Policy, storage: Storage) -> None:
        self._loop, self._spec, self._policy, self._storage = loop, spec, policy, storage
        self._page_tokens = page_tokens
        self._pages_per_s = spec.prefill_tokens_per_s / page_tokens
        self._threshold = -(-spec.threshold_tokens // page_tokens)
        self._l1 = LruPages(max(1, spec.l1_tokens // page_tokens))
        self._l2 = LruPages(max(1, spec.l2_tokens // page_tokens))
        self._occupied, self._occupied_limit = 0, spec.host_share * max(1, spec.l2_tokens // page_tokens)
        self._queue = FetchQueue(loop, spec, storage, page_tokens, self._batch_arrived)
        self._waiting: list[_Waiting] = []
        self._free_servers = spec.servers
        self._query_free = self._write_free = 0.0
        self._full_s = self._full_since = self._last_event = 0.0
        self._is_poll_planned = False
        self.load_tokens = 0
        self.columns = RunColumns()

    def arrive(self, index: int, request: Request) -> None:
        item = _Waiting(index, request)
        self._waiting.append(item)
        self.load_tokens += request.input_tokens
        self._submit(item)
        self._admit()

    def _cached_pages(self, request: Request) -> int:
        on_gpu = self._l1.prefix(request.pages)
        return on_gpu + self._l2.prefix(request.pages, on_gpu)

    def _submit(self, item: _Waiting) -> None:
        start = self._cached_pages(item.request)
        wanted = len(item.request.pages) - start
        if wanted < self._threshold or not wanted:
            return
        item.is_declined = self._occupied >= self._occupied_limit
        if item.is_declined:
            self.columns.declined += item.retries == 0
            return
        self._occupied += wanted
        now = self._loop.now
        item.fetch = Fetch(item.request, start, wanted, now, last_progress_at=now)
        self._query_free = max(now, self._query_free) + self._spec.query_s
        self._loop.at(self._query_free, self._queried, item.fetch)

    def _queried(self, fetch: Fetch) -> None:
        hit = 0
        if not fetch.is_stopped:
            found = self._storage.prefix(fetch.request.pages, fetch.start)
            self.columns.storage_hit_tokens += found * self._page_tokens
            hit = self._l2.reserve(found) if found >= self._threshold else 0
        fetch.hit, fetch.held, fetch.held_at = hit, hit, self._loop.now
        if hit < max(1, self._threshold):
            self._end(fetch)
        else:
            fetch.last_progress_at = self._loop.now
            self.columns.prefetches += 1
            self._queue.push(fetch)
        self._admit()

    def _batch_arrived(self, fetch: Fetch) -> None:
        if fetch.is_stopped:
            if not fetch.in_flight:
                self._drained(fetch)
        elif fetch.completed == fetch.hit:
            self._insert(fetch)
            self._end(fetch)
        self._admit()

    def _insert(self, fetch: Fetch) -> None:
        """Hand the completed pages to the host tree."""
        pages, done = fetch.request.pages, fetch.start + fetch.completed
        had = min(done, max(fetch.start, self._cached_pages(fetch.request)))
        self._release(fetch, fetch.completed)
        self._l2.add(pages[:done])
        self.columns.storage_tokens_used += (done - had) * self._page_tokens
        self.columns.tokens_thrown_away += (fetch.completed - done + had) * self._page_tokens

    def _stop(self, fetch: Fetch) -> None:
        """End a prefetch at admission: what is there is used, what was not begun is freed, the rest drains."""
        fetch.is_stopped = True
        self._queue.cut(fetch)
        if fetch.hit is None:
            return
        self.columns.stopped += 1
        self._insert(fetch)
        self._release(fetch, fetch.hit - fetch.issued)
        if not fetch.in_flight:
            self._drained(fetch)

    def _drained(self, fetch: Fetch) -> None:
        self.columns.tokens_thrown_away += (fetch.arrived - fetch.completed) * self._page_tokens
        self._end(fetch)

    def _release(self, fetch: Fetch, pages: int) -> None:
        self.columns.host_page_s += pages * (self._loop.now - fetch.held_at)
        self._l2.release(pages)
        fetch.held -= pages

    def _end(self, fetch: Fetch) -> None:
        fetch.is_over = True
        self._release(fetch, fetch.held)
        self._occupied -= fetch.requested
        for item in self._waiting:
            if item.is_declined and item.retries < MAX_RETRIES and self._occupied < self._occupied_limit:
                item.retries += 1
                self._submit(item)

    def _admit(self) -> None:
        self._last_event = self._loop.now
        self._try_admit()

    def _try_admit(self) -> None:
        """Give free servers the oldest requests that need not wait; poll again later when all of them must."""
        while self._free_servers and self._waiting:
            for position, item in enumerate(self._waiting):
                if item.fetch is None or item.fetch.is_over or self._need_not_wait(item.fetch):
                    del self._waiting[position]
                    self._start(item)
                    break
            else:
                if not self._is_poll_planned:
                    self._is_poll_planned = True
                    quiet_s = self._loop.now - self._last_event
                    self._loop.at(self._loop.now + self._spec.poll_s + 0.02 * quiet_s, self._poll)
                return

    def _poll(self) -> None:
        self._is_poll_planned = False
        self._try_admit()

    def _need_not_wait(self, fetch: Fetch) -> bool:
        queue = self._queue
        view = fetch.view(
            ahead=queue.pages_ahead(fetch) if self._policy.uses_rates else 0,
            fetch_pages_per_s=queue.rate.per_s,
            recompute_pages_per_s=self._pages_per_s,
            others_waiting=len(self._waiting) - 1,
            busy_s=self._full_s - fetch.full_before_s,
        )
        if self._policy(view, self._loop.now).is_stop:
            self._stop(fetch)
            return True
        if fetch.first_blocked_at is None:
            fetch.first_blocked_at = self._loop.now
            fetch.full_before_s = self._full_s
        return False

    def _start(self, item: _Waiting) -> None:
        request, spec = item.request, self._spec
        on_gpu = self._l1.prefix(request.pages)
        in_host = self._l2.prefix(request.pages, on_gpu)
        cached = on_gpu + in_host
        self._l1.touch(request.pages[:on_gpu])
        self._l2.touch(request.pages[:cached])
        tokens = max(1, request.input_tokens - cached * self._page_tokens)
        load_back_s = in_host * self._page_tokens * spec.kv_bytes_per_token / spec.load_back_Bps
        gpu_s = spec.prefill_overhead_s + max(tokens / spec.prefill_tokens_per_s, load_back_s)
        self._count(item, cached, request.input_tokens - tokens, gpu_s)
        self._free_servers -= 1
        if not self._free_servers:
            self._full_since = self._loop.now
        self._loop.at(self._loop.now + gpu_s, self._finish, item)

    def _count(self, item: _Waiting, cached_pages: int, cached_tokens: int, gpu_s: float) -> None:
        columns, fetch = self.columns, item.fetch
        columns.input_tokens += item.request.input_tokens
        columns.cached_tokens += cached_tokens
        columns.input_pages += len(item.request.pages)
        columns.cached_pages += cached_pages
        columns.gpu_busy_s += gpu_s
        columns.recomputed_gpu_s += self._storage.prefix(item.request.pages, cached_pages) / self._pages_per_s
        if fetch is not None and fetch.first_blocked_at is not None:
            idle = self._loop.now - fetch.first_blocked_at - (self._full_s - fetch.full_before_s)
            limit = (fetch.hit or 0) / self._pages_per_s + self._spec.poll_s
            columns.wait_s += idle
            columns.deadline_misses += bool(fetch.hit) and idle > limit

    def _finish(self, item: _Waiting) -> None:
        now, pages = self._loop.now, item.request.pages
        self.columns.ttft_s[item.index] = now - item.request.arrival_s
        self.load_tokens -= item.request.input_tokens
        if not self._free_servers:
            self._full_s += now - self._full_since
        self._free_servers += 1
        self._l1.add(pages)
        self._l2.add(pages)
        self._write(pages)
        self._admit()

    def _write(self, pages: tuple[int, ...]) -> None:
        new = len(pages) - self._storage.prefix(pages, 0)
        if new:
            nbytes = new * self._page_tokens * self._spec.kv_bytes_per_token
            self._write_free = max(self._loop.now, self._write_free) + nbytes / self._spec.l3_write_Bps
            self._loop.at(self._write_free, self._storage.add, pages)


def simulate(
    load: Load, spec: NodeSpec, model: LatencyModel, policy: str, settings: PolicySettings | None = None
) -> RunColumns:
    """Replay ``load`` on one node under one policy."""
    loop = EventLoop()
    chosen = make_policy(policy, settings or PolicySettings(page_tokens=load.page_tokens))
    capacity = max(1, spec.l3_tokens // load.page_tokens) if spec.l3_tokens else None
    last = load.duration_s
    storage = LocalStorage(
        loop,
        model,
        spec.l3_read_Bps,
        spec.l3_stream_Bps,
        capacity,
        load.stored,
        lambda: loop.now < last or node.load_tokens > 0,
    )
    node = Node(loop, spec, load.page_tokens, chosen, storage)
    for index, request in enumerate(load.requests):
        loop.at(request.arrival_s, node.arrive, index, request)
    loop.run()
    return node.columns
