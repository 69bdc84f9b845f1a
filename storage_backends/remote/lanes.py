"""Lanes of one life of the worker: lease, talk with a deadline, and never again after one has run late."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

from sglang_hicache_ext.storage_backends.remote.engine import NEVER_STARTED
from sglang_hicache_ext.storage_backends.remote.ring import Ring
from sglang_hicache_ext.storage_backends.remote.worker import MAX_MESSAGE

SEND_TIMEOUT_S = 1.0
"""A channel has at most two small messages under way, so a send that blocks means the worker is gone."""


class LateError(Exception):
    """No reply within the deadline. What was asked for may still happen."""


class WorkerGoneError(Exception):
    """The worker ended or refused the call; nothing it was asked for is known to have happened."""


class Channel:
    """One socket to the worker, behind it one thread there. One thread at a time here.

    Attributes:
        half: offset of its half of a lane's ring memory; 0 for a control channel, which moves no page.
        is_tainted: a late reply told of an error after which bytes may still move.
    """

    def __init__(self, sock: socket.socket, half: int = 0) -> None:
        self.sock, self.half = sock, half
        self._next_id = 0
        self._owed: set[int] = set()
        self.is_tainted = False

    @property
    def is_owed(self) -> bool:
        """True while a reply is missing. Late replies are taken off the socket and thrown away, errors remembered."""
        while self._owed:
            try:
                self.sock.settimeout(0)  # a time-out left over from a call would be waited for
                raw = self.sock.recv(MAX_MESSAGE)
            except BlockingIOError:
                return True
            except OSError:
                return True
            if not raw:
                return True
            reply = json.loads(raw)
            self._owed.discard(reply["id"])
            codes = reply.get("codes")
            self.is_tainted |= codes is None or (
                isinstance(codes, list) and any(isinstance(c, int) and c < 0 and c not in NEVER_STARTED for c in codes)
            )
        return False

    def send(self, op: str, *args: Any, in_turn: bool = False) -> int:
        """Hand over a request; returns its number. Raises WorkerGoneError.

        Args:
            in_turn: wait there for a request of the lane's other channel that is also in turn.
        """
        self._next_id += 1
        try:
            self.sock.settimeout(SEND_TIMEOUT_S)
            self.sock.send(json.dumps({"op": op, "id": self._next_id, "args": args, "in_turn": in_turn}).encode())
        except OSError as error:
            raise WorkerGoneError(str(error)) from error
        self._owed.add(self._next_id)
        return self._next_id

    def receive(self, number: int, deadline: float) -> Any:
        """The reply to request ``number`` before ``deadline`` (time.monotonic). Raises LateError, WorkerGoneError."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LateError
            self.sock.settimeout(left)
            try:
                raw = self.sock.recv(MAX_MESSAGE)
            except TimeoutError:
                raise LateError from None
            except OSError as error:
                raise WorkerGoneError(str(error)) from error
            if not raw:
                raise WorkerGoneError("the worker ended")
            reply = json.loads(raw)
            self._owed.discard(reply["id"])
            if reply["id"] == number:
                if "error" in reply:
                    raise WorkerGoneError(reply["error"])
                return reply["codes"]


class Lane:
    """Two channels with a half of ring memory each, so that two batches can travel at once. One thread at a time.

    Attributes:
        ring: keeps the memory mapped while the lane is in use.
    """

    def __init__(self, ring: Ring, channels: tuple[Channel, ...]) -> None:
        self.ring, self.channels = ring, channels

    @property
    def is_owed(self) -> bool:
        owed = [c.is_owed for c in self.channels]  # all of them: each takes its late replies
        return any(owed)

    @property
    def is_tainted(self) -> bool:
        return any(c.is_tainted for c in self.channels)

    def close(self) -> None:
        for channel in self.channels:
            channel.sock.close()


class LanePool:
    """The lanes of one worker life. Thread-safe.

    Writers never take the last free data lane, so that backup cannot starve prefetch.
    """

    def __init__(self, data: list[Lane], control: list[Channel]) -> None:
        self._changed = threading.Condition()
        self._data, self._control = list(data), list(control)
        self._busy: list[tuple[float, Lane]] = []
        self._all_data, self._all_control = tuple(data), tuple(control)
        self._data_lanes = len(data)
        self._leased: set[Lane] = set()
        self._asking: set[Channel] = set()
        self._writers = 0
        self.quarantined = 0
        self._is_closed = self._is_disposed = False

    @property
    def usable_lanes(self) -> int:
        return self._data_lanes - self.quarantined

    def lease(self, deadline: float, *, for_write: bool = False) -> Lane | None:
        """A data lane, or None at ``deadline`` or when the pool is closed."""
        with self._changed:
            while not self._is_closed:
                self._settle()
                if self._data and not (for_write and self._writers and self._writers >= self.usable_lanes // 2):
                    self._writers += for_write
                    lane = self._data.pop()
                    self._leased.add(lane)
                    return lane
                left = deadline - time.monotonic()
                if left <= 0 or not self.usable_lanes:
                    return None
                self._changed.wait(min(left, 0.05) if self._busy else left)
        return None

    def _settle(self) -> None:
        """Look after busy lanes: usable again when all replies came in time and well, else quarantined."""
        still_busy = []
        for settles_by, lane in self._busy:
            if not lane.is_owed and not lane.is_tainted:
                self._data.append(lane)
            elif lane.is_tainted or time.monotonic() >= settles_by:
                self.quarantined += 1
            else:
                still_busy.append((settles_by, lane))
        self._busy = still_busy

    def give_back(self, lane: Lane, *, is_clean: bool, for_write: bool = False, settles_by: float = 0.0) -> None:
        """End a lease. A lane that is not clean is quarantined for the rest of this worker's life, unless what is in
        flight on it still has time until ``settles_by`` (time.monotonic) and then ends well."""
        with self._changed:
            self._leased.discard(lane)
            self._writers -= for_write
            if self._is_disposed:
                lane.close()
            elif is_clean and not lane.is_owed:
                self._data.append(lane)
            elif settles_by and not lane.is_tainted:
                self._busy.append((settles_by, lane))
                self._settle()
            else:
                self.quarantined += 1
            self._changed.notify_all()

    def ask(self, deadline: float, op: str, *args: Any) -> Any:
        """One request on a control channel, which moves no page. Raises LateError, WorkerGoneError."""
        channel = self._take_control(deadline)
        try:
            return channel.receive(channel.send(op, *args), deadline)
        finally:
            with self._changed:
                self._asking.discard(channel)
                self._control.append(channel)
                if self._is_disposed:
                    channel.sock.close()
                self._changed.notify_all()

    def _take_control(self, deadline: float) -> Channel:
        with self._changed:
            while True:
                if self._is_closed:
                    raise WorkerGoneError("the worker was given up")
                for channel in self._control:
                    if not channel.is_owed:
                        self._control.remove(channel)
                        self._asking.add(channel)
                        return channel
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LateError
                self._changed.wait(min(left, 0.05))  # a late reply wakes nobody

    def close(self, drain_s: float) -> bool:
        """Hand out no more lanes; wait at most ``drain_s`` for leases to end. True when none is left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._leased, drain_s)

    def dispose(self) -> None:
        """Close the sockets; those of lanes still leased follow at the end of their lease."""
        with self._changed:
            self._is_closed = self._is_disposed = True
            for lane in self._all_data:
                if lane not in self._leased:
                    lane.close()
            for channel in self._all_control:
                if channel not in self._asking:
                    channel.sock.close()
            self._changed.notify_all()
