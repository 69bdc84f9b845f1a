"""L3 in SGLang's stream of KV events, for routers that send a request where its prefix is. On with ``kv_events``.

The events are SGLang's own BlockStored and BlockRemoved with ``medium`` DISK. They go out with SGLang's own, over its publisher
and in its numbering, so a router sees one ordered stream: a page's event for GPU or host memory comes first, the one for
L3 after the page can be found by anybody. Nothing of this runs on the path of the bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.ports import ChangeFeed, Namespace
from sglang_hicache_ext.sglang_adapter.channel import PoolChannel
from sglang_hicache_ext.sglang_adapter.event_ledger import EventLedger, Step, hash_of
from sglang_hicache_ext.sglang_adapter.identity import server_args

if TYPE_CHECKING:
    from sglang_hicache_ext.sglang_adapter.storage import HiCacheExtStorage

logger = logging.getLogger(__name__)

EVERY_S = 0.5
"""Between two looks at what other processes did to the directory."""
PER_LOOK = 4096
"""Pages of one look: two microseconds each."""
WHERE = "--hicache-storage-backend-extra-config"
_TAKE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.take_events"
_feeds: WeakKeyDictionary[Any, KvEvents] = WeakKeyDictionary()
_installed: set[str] = set()


class KvEvents:
    """The events of one backend. ``merge`` and ``farewell`` belong to the scheduler thread."""

    def __init__(self, backend: HiCacheExtStorage, feed: ChangeFeed) -> None:
        self._backend, self._feed = backend, feed
        self._ledger = EventLedger(backend.metrics)
        self._channel: PoolChannel | None = None
        self._ns: Namespace | None = None
        self._page_tokens = 1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hicache-kv-events", daemon=True)

    def start(self, channel: PoolChannel) -> None:
        """Follow the pages of the KV pool. Once."""
        if self._channel is None and channel.pages is not None:
            self._channel, self._page_tokens = channel, channel.pages.page_tokens
            self._follow(channel.namespace)
            self._thread.start()

    def _follow(self, ns: Namespace) -> None:
        self._feed.watch(ns, self._ledger.hear)
        self._ns = ns

    # ---- scheduler thread

    def merge(self, events: list[Any]) -> list[Any]:
        """SGLang's events with ours behind them."""
        for event in events:
            kind = type(event).__name__
            if kind == "BlockStored":
                self._ledger.learn(event)
            elif kind == "AllBlocksCleared":
                self._ledger.cleared()
        return [*events, *self._spoken(self._ledger.steps())]

    def farewell(self, events: list[Any]) -> list[Any]:
        """SGLang's events, and everything we announced taken back."""
        return [*events, *self._spoken(self._ledger.farewell())]

    def _spoken(self, steps: Sequence[Step]) -> list[Any]:
        if not steps:
            return []
        from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
        from sglang.srt.mem_cache.events import KVCacheEventRecorder

        recorder = KVCacheEventRecorder(enabled=True, page_size=self._page_tokens)  # joins neighbours as SGLang does
        for head, words in steps:
            if words is None:
                recorder.enqueue(BlockRemoved(block_hashes=[hash_of(head)], medium=StorageMedium.DISK))
            else:
                recorder.enqueue(
                    BlockStored(
                        block_hashes=[hash_of(head)],
                        parent_block_hash=words.parent,
                        token_ids=list(words.tokens),
                        block_size=words.block_size,
                        lora_id=words.lora_id,
                        medium=StorageMedium.DISK,
                        cache_salt=words.cache_salt,
                        lora_name=words.lora_name,
                    )
                )
        told: list[Any] = recorder.take()
        return told

    # ---- watcher

    def _watch(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._backend.guarded("kv_events", self.look)

    def look(self) -> None:
        """Compare what was told with what is there: other ranks, servers and tools change the directory too."""
        assert self._channel is not None
        ns = self._channel.namespace
        if self._ns is None or ns.id != self._ns.id:
            self._ledger.forget_all()
            self._follow(ns)
        for heads in (self._ledger.take_asked(PER_LOOK), self._ledger.next_announced(PER_LOOK)):
            self._ledger.settle(heads, self._feed.present_heads(ns, heads).tolist())

    @property
    def announced_pages(self) -> int:
        return self._ledger.announced_pages

    def close(self) -> None:
        """Stop following; what was announced is taken back when SGLang asks for events again."""
        self._closing.set()
        self._feed.unwatch()
        if self._thread.is_alive():
            self._thread.join(2.0)


def open_kv_events(backend: HiCacheExtStorage) -> KvEvents | None:
    """The events of ``backend`` on the rank that publishes; None when they are off or this is another rank.

    Raises:
        ConfigError: SGLang publishes no events, or the store has none.
    """
    if not backend.config.kv_events:
        return None
    feed: ChangeFeed | None = getattr(backend.store, "changes", None)
    if feed is None:
        raise ConfigError(
            f"kv_events is on, but pages of {backend.backend_name!r} belong to no node", WHERE, "use nvme or tiered"
        )
    args = server_args()
    config = getattr(args, "kv_events_config", None)
    if args is not None and not config:
        raise ConfigError(
            "kv_events is on, but SGLang publishes no events",
            WHERE,
            """start with --kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'""",
        )
    from sglang.srt.disaggregation.kv_events import is_kv_publisher_rank

    if not is_kv_publisher_rank(config):
        return None
    _install()
    return KvEvents(backend, feed)


def _install() -> None:
    """Hook the one place where SGLang's scheduler collects its events. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _TAKE not in _installed:
        HookRegistry.register(_TAKE, _take_events, HookType.AROUND)
        _installed.add(_TAKE)
        HookRegistry.apply_hooks()


def _take_events(original: Any, cache: Any) -> list[Any]:
    events: list[Any] = original(cache)
    controller = getattr(cache, "cache_controller", None)
    now: KvEvents | None = getattr(getattr(controller, "storage_backend", None), "kv_events", None)
    before = _feeds.get(cache)
    if now is None and before is None:
        return events
    try:
        if before is not None and before is not now:
            del _feeds[cache]
            events = before.farewell(events)
        if now is not None:
            _feeds[cache] = now
            events = now.merge(events)
    except Exception:  # SGLang's own events must go out whatever happens to ours
        logger.exception("the events of L3 could not be made; SGLang's own go on")
    return events
