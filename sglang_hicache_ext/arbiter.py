"""One arbiter per NIC or drive, shared by every process of a node: PD first, then demand prefetch, then backup.

PD transfers never wait: they are announced, and prefetch waits while one is in flight, and does not start a batch that would
still run when the next one is due. Backup also waits for prefetch. A token bucket limits prefetch and backup together where a
rate is set; PD draws from it without asking. Every wait is bounded, so nobody starves and nobody hangs on a dead process.

The state is one small file in shared memory. PD takes no lock: each announcing thread has a slot that only it writes, one
aligned 8-byte store to begin and one to end, so that a process held off the CPU can never hold PD up. Prefetch and backup
take a file lock only where a rate is set; the system releases it when its holder dies.
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

CHUNK_BYTES = 4 << 20
LEAST_CHUNK_PAGES, MOST_CHUNK_PAGES = 4, 16
"""A batch beside PD traffic: enough pages to be worth a round trip, few enough to yield soon."""
WINDOW_SHARE = 0.5
"""Of the time between two PD transfers, how much one batch may take."""
POLL_S = 0.0003
PD_STALE_NS = 1_000_000_000
"""An announced PD transfer older than this belongs to a dead or stuck process and holds nobody up."""
PREFETCH_PATIENCE_S = 0.1
BACKUP_PATIENCE_S = 1.0
"""How long a batch may be held up by traffic that goes first; then it goes anyway."""
BURST_S = 0.05
MAGIC = 0x4858_6172_6269_0002
PD_SLOTS = 64
_NS = 1_000_000_000

F_MAGIC, F_TOKENS, F_REFILLED, F_RATE, F_PREFETCH_UNTIL, F_PREFETCH_PS, F_BACKUP_PS, F_DRAWN, F_USED = range(9)
S_PID, S_STARTED, S_LAST, S_GAP, S_TOOK, S_DRAWN = range(6)
_HEAD, _SLOT = 16, 8
_FIELDS = _HEAD + _SLOT * PD_SLOTS


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
        self._slots: list[int] = []
        self._waited_s = 0.0
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
        slot = self._take_slot()
        started = self._begin_pd(slot, nbytes)
        try:
            yield
        finally:
            self._end_pd(slot, started)
            self._slots.append(slot)

    def _take_slot(self) -> int:
        """A slot of this handle; the first use by a thread claims one for good, 0 when none is free."""
        try:
            return self._slots.pop()
        except IndexError:
            pass
        with self._locked():
            for index in range(PD_SLOTS):
                slot = _HEAD + _SLOT * index
                if not _is_running(self._get(slot + S_PID)):
                    for field in (S_STARTED, S_LAST, S_GAP, S_TOOK):
                        self._set(slot + field, 0)
                    self._set(slot + S_PID, os.getpid())
                    self._set(F_USED, max(self._get(F_USED), index + 1))
                    return slot
        return 0  # all slots taken: the others hold prefetch up already

    def _begin_pd(self, slot: int, nbytes: int) -> int:
        now = self._clock_ns()
        if slot:
            last, known = self._get(slot + S_LAST), self._get(slot + S_GAP)
            gap = now - last
            is_new_burst = not last or gap > PD_STALE_NS  # its rhythm is not known yet
            self._set(slot + S_GAP, 0 if is_new_burst else _smooth(known, gap))
            self._set(slot + S_LAST, now)
            self._set(slot + S_DRAWN, self._get(slot + S_DRAWN) + nbytes)
            self._set(slot + S_STARTED, now)
        return now

    def _end_pd(self, slot: int, started: int) -> None:
        if slot:
            self._set(slot + S_STARTED, 0)
            self._set(slot + S_TOOK, _smooth(self._get(slot + S_TOOK), self._clock_ns() - started))

    def _active_slots(self) -> range:
        return range(_HEAD, _HEAD + _SLOT * self._get(F_USED), _SLOT)

    def _pd_in_flight(self, now: int) -> bool:
        starts = (self._get(slot + S_STARTED) for slot in self._active_slots())
        return any(s and now - s <= PD_STALE_NS for s in starts)

    # ------------------------------------------------------------------------------- prefetch and backup

    def acquire(self, traffic: Traffic, nbytes: int, deadline: float) -> bool:
        """Wait until a batch of ``nbytes`` may go, at most until ``deadline`` (time.monotonic) and the class's patience.

        Returns:
            True when it may go; False when the deadline came first.
        """
        patience_s = PREFETCH_PATIENCE_S if traffic is Traffic.PREFETCH else BACKUP_PATIENCE_S
        started = self._clock_ns()
        while True:
            now = self._clock_ns()
            if now >= deadline * _NS:
                return False
            if traffic is Traffic.PREFETCH:
                self._set(F_PREFETCH_UNTIL, now + int(2 * POLL_S * _NS))
            yields = now - started < patience_s * _NS and self._must_yield(traffic, nbytes, now)
            if not yields and self._pay(nbytes, now):
                if traffic is Traffic.PREFETCH:
                    self._waited_s += (now - started) / _NS
                    self._set(F_PREFETCH_UNTIL, now + nbytes * self._get(F_PREFETCH_PS) // 1000)
                return True
            self._sleep(POLL_S)

    def _pay(self, nbytes: int, now: int) -> bool:
        """Take the batch's tokens, when there are any; always True without a rate."""
        if not self._get(F_RATE):
            return True
        with self._locked():
            self._refill(now)
            tokens = self._get(F_TOKENS)
            if tokens > 0:
                self._set(F_TOKENS, tokens - nbytes)
            return tokens > 0

    def batch_pages(self, traffic: Traffic, page_bytes: int) -> int:
        """Pages per batch now: LEAST_CHUNK_PAGES to MOST_CHUNK_PAGES, so that it ends well before the next PD transfer."""
        most = max(LEAST_CHUNK_PAGES, min(MOST_CHUNK_PAGES, CHUNK_BYTES // page_bytes))
        page_ns = page_bytes * self._get(F_PREFETCH_PS if traffic is Traffic.PREFETCH else F_BACKUP_PS) // 1000
        now, windows = self._clock_ns(), list[int]()
        for slot in self._active_slots():
            gap = self._get(slot + S_GAP)
            if gap and now - self._get(slot + S_LAST) <= PD_STALE_NS:
                windows.append(gap - self._get(slot + S_TOOK))
        if not windows or not page_ns:
            return most
        return max(LEAST_CHUNK_PAGES, min(most, int(min(windows) * WINDOW_SHARE) // page_ns))

    def done(self, traffic: Traffic, nbytes: int, seconds: float) -> None:
        """Tell how long a batch took, so that the next one is not started where it would not fit."""
        field = F_PREFETCH_PS if traffic is Traffic.PREFETCH else F_BACKUP_PS
        if nbytes > 0:
            self._set(field, _smooth(self._get(field), int(seconds * 1e12 / nbytes)))

    def _must_yield(self, traffic: Traffic, nbytes: int, now: int) -> bool:
        if self._pd_in_flight(now):
            return True
        if traffic is Traffic.BACKUP and now < self._get(F_PREFETCH_UNTIL):
            return True
        field = F_PREFETCH_PS if traffic is Traffic.PREFETCH else F_BACKUP_PS
        batch_ns = nbytes * self._get(field) // 1000
        return any(self._would_collide(slot, now, batch_ns) for slot in self._active_slots())

    def _would_collide(self, slot: int, now: int, batch_ns: int) -> bool:
        """Whether a batch started now would still run when the slot's next transfer is due. No rhythm, no opinion."""
        gap = self._get(slot + S_GAP)
        if not gap or batch_ns > gap - self._get(slot + S_TOOK):
            return False  # it fits nowhere: waiting would not help
        due = self._get(slot + S_LAST) + gap
        return due - batch_ns < now < due + gap // 2

    def _refill(self, now: int) -> None:
        """Add what time has earned and take off what PD has drawn since. Under the lock."""
        rate = self._get(F_RATE)
        earned = rate * max(0, now - self._get(F_REFILLED)) // _NS
        drawn = sum(self._get(slot + S_DRAWN) for slot in self._active_slots())
        tokens = self._get(F_TOKENS) - max(0, drawn - self._get(F_DRAWN))
        self._set(F_DRAWN, drawn)
        self._set(F_TOKENS, min(int(rate * BURST_S), tokens + earned))
        if earned:
            self._set(F_REFILLED, now)

    def describe(self) -> dict[str, object]:
        active = [s for s in self._active_slots() if self._get(s + S_LAST)]
        return {
            "name": self.name,
            "rate_bytes_per_s": self._get(F_RATE),
            "pd_gap_ms": [self._get(s + S_GAP) / 1e6 for s in active],
            "pd_took_ms": [self._get(s + S_TOOK) / 1e6 for s in active],
            "prefetch_ns_per_byte": self._get(F_PREFETCH_PS) / 1000,
            "waited_s": round(self._waited_s, 3),
        }

    def close(self, *, remove: bool = False) -> None:
        """Drop the handle; the state stays for the other processes unless ``remove`` is given."""
        with self._threads:
            if self._fd >= 0:
                for slot in self._slots:
                    self._set(slot + S_PID, 0)
                self._slots.clear()
                self._map.close()
                os.close(self._fd)
                self._fd = -1
                if remove:
                    os.unlink(self._path)


def _smooth(known: int, seen: int) -> int:
    """A moving average over about four observations."""
    return known + (seen - known) // 4 if known else seen


def _is_running(pid: int) -> bool:
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
