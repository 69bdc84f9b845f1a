"""Messages between the two servers over SGLang's own sockets: which room wants what, and what became of a promise.

The pages themselves, their epochs and aborts are the endpoints' business; these frames only tie them to rooms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.pd.hooks import Reservation, TransferKey

ROOM, KEPT, WITHDRAWN, STATUS = b"HXPD_ROOM", b"HXPD_KEPT", b"HXPD_WITHDRAWN", b"HXPD_STATUS"
REST = 1 << 63
"""Set in the room number of the transfer that carries a withdrawn prefix; SGLang's rooms are below it."""


@dataclass(frozen=True, slots=True)
class Announced:
    """One decode rank's part in a room, as the prefill side keeps it in ``transfer_infos``.

    Attributes:
        endpoint, dst_port: where the decode rank's status socket listens.
        reservation: where its pages go; None for a rank that takes part without receiving.
        decode_prefix_len: tokens from the start that prefill need not send.
        is_promise: part of that prefix is not loaded yet: a KEPT or a WITHDRAWN follows.
    """

    room: int
    endpoint: str
    dst_port: int
    required_dst_info_num: int
    decode_prefix_len: int
    is_promise: bool
    reservation: Reservation | None

    @property
    def is_dummy(self) -> bool:
        return self.reservation is None

    @property
    def key(self) -> TransferKey | None:
        return self.reservation.key if self.reservation is not None else None

    @property
    def source(self) -> tuple[str, int]:
        return self.endpoint, self.dst_port


def room_message(announced: Announced) -> list[bytes]:
    """ROOM or, for a reservation whose room has the REST bit, WITHDRAWN."""
    found = announced.reservation
    head = {
        "room": announced.room,
        "endpoint": announced.endpoint,
        "port": announced.dst_port,
        "required": announced.required_dst_info_num,
        "prefix": announced.decode_prefix_len,
        "promise": announced.is_promise,
        "key": [found.key.peer, found.key.room, found.key.epoch] if found is not None else None,
        "spaces": sorted(found.extra) if found is not None else [],
    }
    arrays = [found.pages, *(found.extra[s] for s in sorted(found.extra))] if found is not None else []
    tag = WITHDRAWN if found is not None and found.key.room & REST else ROOM
    return [tag, json.dumps(head).encode(), *(np.ascontiguousarray(a, np.int64).tobytes() for a in arrays)]


def parse_room(frames: list[bytes]) -> Announced:
    """Inverse of ``room_message``. Raises ValueError, KeyError, TypeError or IndexError for foreign bytes."""
    head = json.loads(frames[1])
    return Announced(
        room=int(head["room"]),
        endpoint=str(head["endpoint"]),
        dst_port=int(head["port"]),
        required_dst_info_num=int(head["required"]),
        decode_prefix_len=int(head["prefix"]),
        is_promise=bool(head["promise"]),
        reservation=_reservation(head, frames[2:]),
    )


def _reservation(head: Mapping[str, Any], arrays: list[bytes]) -> Reservation | None:
    key = head["key"]
    if key is None:
        return None
    peer, room, epoch = key
    numbers: list[NDArray[np.int64]] = [np.frombuffer(a, np.int64) for a in arrays]
    extra = dict(zip(head["spaces"], numbers[1:], strict=True))
    return Reservation(TransferKey(str(peer), int(room), int(epoch)), numbers[0], extra)


def kept_message(room: int, source: tuple[str, int]) -> list[bytes]:
    return [KEPT, json.dumps({"room": room, "endpoint": source[0], "port": source[1]}).encode()]


def parse_kept(frames: list[bytes]) -> tuple[int, tuple[str, int]]:
    """(room, decode rank's socket). Raises as ``parse_room``."""
    head = json.loads(frames[1])
    return int(head["room"]), (str(head["endpoint"]), int(head["port"]))
