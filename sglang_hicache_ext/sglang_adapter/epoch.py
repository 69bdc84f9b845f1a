"""Weight epochs: whatever changes the weights of a running server changes the fingerprint of every page.

One state per process, since SGLang serves one model per scheduler process; it outlives detach and attach.

An update starts a random epoch before the first weight moves. What happens next decides the lasting one:
after an update from disk that flushed SGLang's own caches, the new files name the weights, so a restart on them finds
its pages; after any other flushed update it stays random; without a flush SGLang itself goes on serving old KV, and
pages of that mixture stay in an epoch that ends with the next flush.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Epoch:
    """What is served now.

    Attributes:
        number: counts changes in this process; equal numbers mean equal epochs.
        value: goes into the fingerprint, "" when the weights alone name it.
        weights: identity of the weights, None for those loaded at start.
        first_operation: SGLang's storage writes with a smaller id hold pages of an earlier epoch.
    """

    number: int = 0
    value: str = ""
    weights: str | None = None
    first_operation: int = 0


class WeightEpoch:
    """Thread-safe: the scheduler thread changes it, storage threads read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Epoch()
        self._after_flush: Epoch | None = None
        self._pinned = threading.local()

    @property
    def now(self) -> Epoch:
        """The epoch of this thread's work: the pinned one inside ``pinned``, else the current one."""
        pinned: Epoch | None = getattr(self._pinned, "epoch", None)
        return pinned if pinned is not None else self._now

    @property
    def is_mixed(self) -> bool:
        """Weights changed and SGLang's caches still hold KV of the old ones."""
        return self._after_flush is not None

    def begin_update(self, token: str, next_operation: int) -> None:
        """Start a fresh epoch. ``token`` is random and the same on every rank."""
        with self._lock:
            self._after_flush = Epoch(0, token)
            self._move_to(Epoch(0, f"{token}-unflushed"), next_operation)

    def name_weights(self, weights: str) -> None:
        """The update came from files with this identity; holds from the flush on."""
        with self._lock:
            if self._after_flush is not None:
                self._after_flush = Epoch(0, "", weights)

    def flushed(self, next_operation: int) -> None:
        """SGLang dropped its cached KV: from here on pages are made by the current weights only."""
        with self._lock:
            if self._after_flush is not None:
                self._move_to(self._after_flush, next_operation)
                self._after_flush = None

    def _move_to(self, target: Epoch, next_operation: int) -> None:
        self._now = replace(target, number=self._now.number + 1, first_operation=next_operation)

    @contextmanager
    def pinned(self, operation_id: int) -> Iterator[bool]:
        """Keep this thread in one epoch for one storage write; False when its pages belong to an earlier epoch."""
        epoch = self._now
        self._pinned.epoch = epoch
        try:
            yield operation_id >= epoch.first_operation
        finally:
            self._pinned.epoch = None


CURRENT = WeightEpoch()


def token_from(random_bytes: bytes) -> str:
    """A token for ``begin_update``."""
    return hashlib.sha256(b"hicache-ext-epoch\0" + random_bytes).hexdigest()[:32]
