"""The bytes of the protocol: frames of the control link and the notes that travel with layer groups.

Numbers are little-endian. A frame is its length (u32), its type (u8) and its body.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from sglang_hicache_ext.errors import HiCacheExtError
from sglang_hicache_ext.pd.hooks import Reservation, TransferKey

PROTOCOL = 1
"""Bump when a byte here changes its meaning; two sides of different numbers refuse each other."""
MAX_FRAME_BYTES = 32 << 20
_MAGIC = b"HXPD"
_NOTE = struct.Struct("<4sBBxxQQIIHH")
_KEY = struct.Struct("<QQ")
_HEAD = struct.Struct("<IB")
U64 = 1 << 64


class WireError(HiCacheExtError):
    """Bytes that are not of this protocol. The link they came on is closed."""


class FrameType(IntEnum):
    HELLO = 1  # both: JSON, who I am
    REFUSED = 2  # both: JSON, why not
    READY = 3  # prefill -> decode: the path is warm
    RESERVE = 4  # decode -> prefill: where the pages go
    ABORT = 5  # decode -> prefill: send no more of it, and tell me when it is settled
    SETTLED = 6  # prefill -> decode: not SENT, and no byte of it will move any more
    GROUP = 7  # prefill -> decode: a note, for drivers that carry none
    WHO = 8  # anybody to a listener: which instance are you?
    ME = 9  # the answer: the instance's name


class NoteKind(IntEnum):
    PAGES = 0
    EXTRA = 1


@dataclass(frozen=True, slots=True)
class Note:
    """A group is in place: layers [start, stop) of pages [first, first + pages) of the reservation, or its extra items."""

    kind: NoteKind
    room: int
    epoch: int
    first: int
    pages: int
    start: int
    stop: int
    is_last: bool

    def pack(self) -> bytes:
        flags = int(self.is_last)
        return _NOTE.pack(
            _MAGIC, self.kind, flags, self.room, self.epoch, self.first, self.pages, self.start, self.stop
        )


def unpack_note(data: bytes) -> Note:
    """Raises WireError."""
    if len(data) != _NOTE.size or data[:4] != _MAGIC or data[4] not in tuple(NoteKind):
        raise WireError(f"a note of {len(data)} bytes that is none of this protocol")
    _, kind, flags, room, epoch, first, pages, start, stop = _NOTE.unpack(data)
    return Note(NoteKind(kind), room, epoch, first, pages, start, stop, bool(flags & 1))


def frame(kind: FrameType, body: bytes = b"") -> bytes:
    return _HEAD.pack(1 + len(body), kind) + body


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[FrameType, bytes]]:
        """Raises WireError for a length or type that cannot be."""
        self._buffer += data
        out = []
        while len(self._buffer) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._buffer)
            if not 1 <= length <= MAX_FRAME_BYTES or kind not in tuple(FrameType):
                raise WireError(f"a frame of type {kind} and {length} bytes")
            if len(self._buffer) < 4 + length:
                break
            out.append((FrameType(kind), bytes(self._buffer[_HEAD.size : 4 + length])))
            del self._buffer[: 4 + length]
        return out


def pack_words(words: dict[str, Any]) -> bytes:
    return json.dumps(words, separators=(",", ":")).encode()


def unpack_words(body: bytes) -> dict[str, Any]:
    try:
        words = json.loads(body)
    except ValueError as e:
        raise WireError("a frame that is no JSON") from e
    if not isinstance(words, dict):
        raise WireError("a frame that is no JSON object")
    return words


def pack_end(key: TransferKey, reason: str = "") -> bytes:
    """Body of ABORT and SETTLED."""
    return _KEY.pack(key.room, key.epoch) + reason.encode()[:4096]


def unpack_end(body: bytes, peer: str) -> tuple[TransferKey, str]:
    if len(body) < _KEY.size:
        raise WireError("a short frame")
    room, epoch = _KEY.unpack_from(body)
    return TransferKey(peer, room, epoch), body[_KEY.size :].decode(errors="replace")


def pack_reservation(reservation: Reservation) -> bytes:
    """Body of RESERVE; also for a caller that carries it itself."""
    key = reservation.key
    spaces = [("page", reservation.pages), *sorted(reservation.extra.items())]
    head = pack_words({"peer": key.peer, "spaces": [[name, len(items)] for name, items in spaces]})
    arrays = [np.ascontiguousarray(items, "<i8").tobytes() for _, items in spaces]
    return b"".join([_KEY.pack(key.room, key.epoch), struct.pack("<I", len(head)), head, *arrays])


def unpack_reservation(body: bytes) -> Reservation:
    """Raises WireError."""
    try:
        room, epoch = _KEY.unpack_from(body)
        (length,) = struct.unpack_from("<I", body, _KEY.size)
        at = _KEY.size + 4 + length
        head = unpack_words(body[_KEY.size + 4 : at])
        arrays: dict[str, Any] = {}
        for name, count in head["spaces"]:
            arrays[str(name)] = np.frombuffer(body, "<i8", count, at).astype(np.int64)
            at += 8 * count
        if at != len(body):
            raise WireError("a reservation with bytes too many")
        return Reservation(TransferKey(str(head["peer"]), room, epoch), arrays.pop("page"), arrays)
    except (struct.error, KeyError, TypeError, ValueError) as e:
        raise WireError("a reservation that cannot be read") from e
