"""The one outcome that every queried or written page ends in. The names are exported as metric labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum


class Outcome(StrEnum):
    """Why a queried page was, or was not, served from L3."""

    LOADED = "loaded"
    ABSENT = "absent"  # never stored, or forgotten beyond the eviction history
    EVICTED = "evicted"  # stored once, reclaimed (within the bounded history)
    HOLE = "hole"  # present, but an earlier page of the chain is not
    MISMATCH = "mismatch"  # stored under another fingerprint (the detail names the field)
    CORRUPT = "corrupt"  # bytes did not prove themselves; the page was removed
    BELOW_THRESHOLD = "below_threshold"  # hit shorter than the prefetch threshold
    RATE_LIMITED = "rate_limited"
    NO_HOST_PAGES = "no_host_pages"
    LATE = "late"  # not there when the policy or the deadline ended the wait
    READ_ERROR = "read_error"  # the device said no; the page stays
    ABORTED = "aborted"  # the request went away
    POLICY_STOP = "policy_stop"  # the policy chose to recompute


class WriteOutcome(StrEnum):
    """What became of a page handed to a store."""

    STORED = "stored"
    PRESENT = "present"  # already there, proven by the index; nothing was written
    FULL = "full"  # refused: capacity, nothing reclaimable now
    WRITE_ERROR = "write_error"
    LATE = "late"  # not complete at the deadline; never published
    CLOSED = "closed"

    @property
    def is_stored(self) -> bool:
        return self in (WriteOutcome.STORED, WriteOutcome.PRESENT)


def good_prefix(outcomes: Iterable[Outcome]) -> int:
    """Count the leading LOADED pages."""
    n = 0
    for o in outcomes:
        if o is not Outcome.LOADED:
            break
        n += 1
    return n


def tally(outcomes: Iterable[Outcome]) -> Counter[Outcome]:
    """Count pages per outcome; the sum is the number of pages."""
    return Counter(outcomes)
