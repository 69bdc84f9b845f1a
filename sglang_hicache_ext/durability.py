"""A handle that tells when a prefix is durable, whichever process writes it.

A store publishes a page only when it is durable in the sense its writer was configured for (``durability``): ``process``
survives kill -9, ``device`` also power loss. So whoever can find a page can rely on it, and asking is enough.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sglang_hicache_ext.ports import Namespace, PageStore

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05


class DurablePrefix:
    """Follows ``keys``, the pages of a prefix in order. Any thread, one at a time.

    Args:
        hold_s: seconds for which durable pages are held against reclaim, from each look on; 0 does not hold them.
    """

    def __init__(self, store: PageStore, ns: Namespace, keys: Sequence[bytes], *, hold_s: float = 0.0) -> None:
        self._store, self._ns, self._keys, self._hold_s = store, ns, tuple(keys), hold_s

    def durable_pages(self) -> int:
        """Leading pages that are durable now. Raises StoreError when the store cannot be asked."""
        return self._store.hit_pages(self._ns, self._keys, self._hold_s)

    def is_durable(self) -> bool:
        """True when the whole prefix is; True for no pages."""
        return self.durable_pages() == len(self._keys)

    def wait(self, timeout_s: float) -> bool:
        """Block at most ``timeout_s`` seconds; return ``is_durable``. A page that was refused for good never becomes it."""
        deadline, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while not self.is_durable():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return True
