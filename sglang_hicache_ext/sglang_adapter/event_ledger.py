"""What a router was told about L3 and what it has to be told next.

SGLang's events say of a page in GPU or host memory: hash, parent, tokens. A page that the store publishes or removes is told in
the same words. SGLang's block hash is the first 8 bytes of the page's key (``hash_str_to_int64``, sglang 0.5.23
srt/mem_cache/utils.py:155), so both sides meet in that ``head``; pages of requests with a cache salt or a LoRA adapter
are hashed differently there, are never met, and are only counted.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.ports import KeyChange

HEAD_BYTES = 8
MAX_KNOWN = 32_768
"""Pages whose words are remembered, from SGLang's event until the store has the page."""
MAX_PENDING = 65_536
"""Published pages not told yet; more are dropped and counted."""
MAX_ANNOUNCED = 1 << 20
"""Pages a router believes in. The oldest is taken back when there are more, so that each can be watched."""
MAX_ASKED = 65_536
"""Pages to be looked up in the store, because SGLang mentioned them."""
PER_TAKE = 4096
"""Events of one call, so that the scheduler thread is not held up."""


@dataclass(frozen=True, slots=True)
class Words:
    """How SGLang spoke of one page. ``parent`` is the block hash of the page before, None for the first."""

    parent: int | None
    tokens: Any
    block_size: int
    lora_id: Any
    cache_salt: str | None
    lora_name: str | None


Step = tuple[bytes, Words | None]
"""(head, its words when it is stored now, None when it is gone)."""


def head_of(block_hash: int) -> bytes:
    return block_hash.to_bytes(HEAD_BYTES, "big", signed=True)


def hash_of(head: bytes) -> int:
    return int.from_bytes(head, "big", signed=True)


class EventLedger:
    """``hear`` from the store's threads, ``learn``, ``cleared`` and ``steps`` from the scheduler thread, the rest from a
    watcher. One short lock, never held while the store is called.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Words] = OrderedDict()
        self._pending: OrderedDict[bytes, bool] = OrderedDict()
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._asked: OrderedDict[bytes, None] = OrderedDict()

    # ---- the store's side

    def hear(self, changes: Iterable[KeyChange]) -> None:
        """Take changes of the store in the order in which they became true. Cheap, never raises."""
        dropped = 0
        with self._lock:
            for key, is_stored in changes:
                dropped += not self._note(key[:HEAD_BYTES], is_stored)
        if dropped:
            self._metrics.add("kv_events_dropped", dropped)

    def _note(self, head: bytes, is_stored: bool) -> bool:
        self._pending.pop(head, None)
        if is_stored == (head in self._announced):
            return True
        if is_stored and len(self._pending) >= MAX_PENDING:
            return False
        self._pending[head] = is_stored  # what goes was announced, so these are bounded too
        return True

    # ---- SGLang's side

    def learn(self, event: Any) -> None:
        """Remember the words of a BlockStored of SGLang's own tiers, page by page."""
        size, parent = event.block_size, event.parent_block_hash
        for at, block_hash in enumerate(event.block_hashes):
            head = head_of(block_hash)
            tokens = event.token_ids[at * size : (at + 1) * size]
            packed = array("q", tokens) if tokens and isinstance(tokens[0], int) else tokens
            self._known.pop(head, None)
            self._known[head] = Words(parent, packed, size, event.lora_id, event.cache_salt, event.lora_name)
            parent = block_hash
            with self._lock:
                if head not in self._announced and len(self._asked) < MAX_ASKED:
                    self._asked[head] = None
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def cleared(self) -> None:
        """SGLang told its listeners to forget everything; what the store holds is told again as pages are mentioned."""
        with self._lock:
            self._announced.clear()

    def steps(self, limit: int = PER_TAKE) -> list[Step]:
        """What to tell now; from here on it counts as told."""
        out: list[Step] = []
        unknown = 0
        with self._lock:
            while self._pending and len(out) < limit:
                head, is_stored = self._pending.popitem(last=False)
                if is_stored == (head in self._announced):
                    continue
                words = self._known.get(head) if is_stored else None
                if is_stored and words is None:
                    unknown += 1
                elif is_stored:
                    self._announced[head] = None
                    out.append((head, words))
                else:
                    del self._announced[head]
                    out.append((head, None))
            while len(self._announced) > MAX_ANNOUNCED:
                out.append((self._announced.popitem(last=False)[0], None))
        stored = sum(words is not None for _, words in out)
        if out:
            self._metrics.add("kv_events_stored", stored)
            self._metrics.add("kv_events_removed", len(out) - stored)
        if unknown:
            self._metrics.add("kv_events_unknown", unknown)
        return out

    def farewell(self) -> list[Step]:
        """Take everything back: the store is not in use any more."""
        with self._lock:
            gone: list[Step] = [(head, None) for head in self._announced]
            self._announced.clear()
            self._pending.clear()
        return gone

    # ---- the watcher's side

    def take_asked(self, limit: int) -> list[bytes]:
        """Heads that SGLang mentioned and that nobody was told of; each once."""
        with self._lock:
            return [self._asked.popitem(last=False)[0] for _ in range(min(limit, len(self._asked)))]

    def next_announced(self, limit: int) -> list[bytes]:
        """The next heads to be checked against the store; they go to the end of the line."""
        with self._lock:
            heads = [self._announced.popitem(last=False)[0] for _ in range(min(limit, len(self._announced)))]
            self._announced.update(dict.fromkeys(heads))
            return heads

    def settle(self, heads: Sequence[bytes], present: Sequence[bool]) -> None:
        """What the store says about ``heads``, whoever changed it."""
        self.hear(zip(heads, present, strict=True))

    def forget_all(self) -> None:
        """None of the announced pages counts any more: other weights are served now."""
        with self._lock:
            for head in self._announced:
                self._pending[head] = False

    @property
    def announced_pages(self) -> int:
        with self._lock:
            return len(self._announced)
