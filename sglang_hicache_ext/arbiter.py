"""One arbiter per NIC or drive, shared by every process of a node: PD first, then demand prefetch, then backup.

PD transfers never wait: they are announced, and prefetch waits while one is in flight, and does not start a batch that would
still run when the next one is due. Backup also waits for prefetch. A token bucket limits prefetch and backup together where a
rate is set; PD draws from it without asking. Every wait is bounded, so nobody starves and nobody hangs on a dead process.

The state is one small file in shared memory under a file lock, which the system releases when its holder dies. One
update costs about 10 us.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from sglang_hicache_ext.errors import ConfigError

CHUNK_PAGES = 16
"""Pages per batch while an arbiter is in use: small enough to yield soon, large enough to be worth a round trip."""
POLL_S = 0.0003
PD_STALE_NS = 1_000_000_000
"""An announced PD transfer older than this belongs to a dead or stuck process and holds nobody up."""
PREFETCH_PATIENCE_S = 0.1
BACKUP_PATIENCE_S = 1.0
"""How long a batch may be held up by traffic that goes first; then it goes anyway."""
BURST_S = 0.05
MAGIC = 0x4858_6172_6269_0001
PD_SLOTS = 64
_NS = 1_000_000_000

(
    F_MAGIC, F_TOKENS, F_REFILLED, F_RATE, F_PREFETCH_UNTIL, F_PD_STARTED, F_PD_GAP, F_PD_TOOK, F_PREFETCH_PS, F_BACKUP_PS,
    F_PREFETCH_WAITED, F_FIRST_SLOT,
) = range(12)  # fmt: skip
_FIELDS = F_FIRST_SLOT + PD_SLOTS


class Traffic(IntEnum):
    """Who goes first."""

    PD = 0
    PREFETCH = 1
    BACKUP = 2


class Arbiter:
    """A handle on the arbiter called ``name``. Thread-safe; any number of processes.

    Args:
        name: of the NIC or drive; letters, digits, "_", "-", ".".
        rate: bytes per second for prefetch and backup together; 0 only orders them. The last to open it decides.
        clock_ns: monotonic nanoseconds that all processes share.
        sleep: called with seconds while waiting.
    """

    def __init__(
        self, name: str, rate: int = 0, *, folder: str = "/dev/shm", clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        if not re.fullmatch(r"[\w.-]{1,64}", name):
            raise ConfigError(f"arbiter is {name!r}", "the arbiter", "write the device's name, for example mlx5_0")
        self.name, self._clock_ns, self._sleep = name, clock_ns, sleep
        self._path = os.path.join(folder, f"hicache-ext-arbiter-{os.getuid()}-{name}")
        self._threads = threading.Lock()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with self._locked_file():
                if os.fstat(self._fd).st_size < 8 * _FIELDS:
                    os.ftruncate(self._fd, 8 * _FIELDS)
            self._map = mmap.mmap(self._fd, 8 * _FIELDS)
        except BaseException:
            os.close(self._fd)
            raise
        with self._locked():
            if self._get(F_MAGIC) != MAGIC:
                self._map[:] = bytes(8 * _FIELDS)
                self._set(F_MAGIC, MAGIC)
            self._set(F_RATE, rate)
            self._set(F_TOKENS, int(rate * BURST_S))
            self._set(F_REFILLED, clock_ns())

    def _get(self, field: int) -> int:
        return int(struct.unpack_from("<q", self._map, 8 * field)[0])

    def _set(self, field: int, value: int) -> None:
        struct.pack_into("<q", self._map, 8 * field, value)

    @contextmanager
    def _locked_file(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads, self._locked_file():
            yield

    # ------------------------------------------------------------------------------------------------ PD

    @contextmanager
    def pd(self, nbytes: int = 0) -> Iterator[None]:
        """Announce a PD transfer of ``nbytes`` for as long as the block runs. Never waits for other traffic."""
        slot, started = self._begin_pd(nbytes)
        try:
            yield
        finally:
            self._end_pd(slot, started)

    def _begin_pd(self, nbytes: int) -> tuple[int, int]:
        with self._locked():
            now = self._clock_ns()
            gap = now - self._get(F_PD_STARTED)
            known = self._get(F_PD_GAP)
            if gap > PD_STALE_NS:
                self._set(F_PD_GAP, 0)  # a new burst: its rhythm is not known yet
            else:
                self._set(F_PD_GAP, known + (gap - known) // 4 if known else gap)
            self._set(F_PD_STARTED, now)
            self._refill(now)
            self._set(F_TOKENS, self._get(F_TOKENS) - nbytes)
            for slot in range(F_FIRST_SLOT, _FIELDS):
                if now - self._get(slot) > PD_STALE_NS:
                    self._set(slot, now)
                    return slot, now
            return 0, now  # all slots taken: the others hold prefetch up already

    def _end_pd(self, slot: int, started: int) -> None:
        with self._locked():
            took, known = self._clock_ns() - started, self._get(F_PD_TOOK)
            self._set(F_PD_TOOK, known + (took - known) // 4 if known else took)
            if slot and self._get(slot) == started:
                self._set(slot, 0)

    def _pd_in_flight(self, now: int) -> bool:
        slots = struct.unpack_from(f"<{PD_SLOTS}q", self._map, 8 * F_FIRST_SLOT)
        return any(s and now - s <= PD_STALE_NS for s in slots)

    # ------------------------------------------------------------------------------- prefetch and backup

    def acquire(self, traffic: Traffic, nbytes: int, deadline: float) -> bool:
        """Wait until a batch of ``nbytes`` may go, at most until ``deadline`` (time.monotonic) and the class's patience.

        Returns:
            True when it may go; False when the deadline came first.
        """
        patience_s = PREFETCH_PATIENCE_S if traffic is Traffic.PREFETCH else BACKUP_PATIENCE_S
        started = self._clock_ns()
        end = int(deadline * _NS)
        while True:
            with self._locked():
                now = self._clock_ns()
                if now >= end:
                    return False
                if traffic is Traffic.PREFETCH:
                    self._set(F_PREFETCH_UNTIL, now + int(2 * POLL_S * _NS))
                self._refill(now)
                has_tokens = not self._get(F_RATE) or self._get(F_TOKENS) > 0
                yields = now - started < patience_s * _NS and self._must_yield(traffic, nbytes, now)
                if has_tokens and not yields:
                    self._set(F_TOKENS, self._get(F_TOKENS) - nbytes)
                    if traffic is Traffic.PREFETCH:
                        self._set(F_PREFETCH_WAITED, self._get(F_PREFETCH_WAITED) + now - started)
                        self._set(F_PREFETCH_UNTIL, now + nbytes * self._get(F_PREFETCH_PS) // 1000)
                    return True
            self._sleep(POLL_S)

    def done(self, traffic: Traffic, nbytes: int, seconds: float) -> None:
        """Tell how long a batch took, so that the next one is not started where it would not fit."""
        field = F_PREFETCH_PS if traffic is Traffic.PREFETCH else F_BACKUP_PS
        if nbytes <= 0:
            return
        with self._locked():
            picoseconds_per_byte, known = int(seconds * 1e12 / nbytes), self._get(field)
            self._set(field, known + (picoseconds_per_byte - known) // 4 if known else picoseconds_per_byte)

    def _must_yield(self, traffic: Traffic, nbytes: int, now: int) -> bool:
        if self._pd_in_flight(now):
            return True
        if traffic is Traffic.BACKUP and now < self._get(F_PREFETCH_UNTIL):
            return True
        field = F_PREFETCH_PS if traffic is Traffic.PREFETCH else F_BACKUP_PS
        return self._would_collide(now, nbytes * self._get(field) // 1000)

    def _would_collide(self, now: int, batch_ns: int) -> bool:
        """Whether a batch started now would still run when the next PD transfer is due. No rhythm, no opinion."""
        gap = self._get(F_PD_GAP)
        if not gap or batch_ns > gap - self._get(F_PD_TOOK):
            return False  # it fits nowhere: waiting would not help
        due = self._get(F_PD_STARTED) + gap
        return due - batch_ns < now < due + gap // 2

    def _refill(self, now: int) -> None:
        rate = self._get(F_RATE)
        if not rate:
            self._set(F_TOKENS, 0)
            return
        most = int(rate * BURST_S)
        earned = rate * max(0, now - self._get(F_REFILLED)) // _NS
        if earned:
            self._set(F_TOKENS, min(most, self._get(F_TOKENS) + earned))
            self._set(F_REFILLED, now)

    def describe(self) -> dict[str, object]:
        with self._locked():
            return {
                "name": self.name,
                "rate_bytes_per_s": self._get(F_RATE),
                "pd_gap_ms": self._get(F_PD_GAP) / 1e6,
                "pd_took_ms": self._get(F_PD_TOOK) / 1e6,
                "prefetch_waited_s": self._get(F_PREFETCH_WAITED) / _NS,
            }

    def close(self, *, remove: bool = False) -> None:
        """Drop the handle; the state stays for the other processes unless ``remove`` is given."""
        with self._threads:
            if self._fd >= 0:
                self._map.close()
                os.close(self._fd)
                self._fd = -1
                if remove:
                    os.unlink(self._path)
