"""A portable archive of pages: one stream, every page proves itself, a damaged one costs only itself.

file      "HXarch\\x01\\n" and then records
record    kind 4 B, body bytes u64, namespace id 16 B, key 32 B, digest 16 B, check 16 B (xxh3-128 of the 76 B before)
HXns      body: the fingerprint as JSON; digest: xxh3-128 of the body
HXpg      body: the payload; digest: the page's digest as every store computes it
HXen      no body; key holds the number of pages
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import KEY_BYTES, NAMESPACE_BYTES, Fingerprint
from sglang_hicache_ext.storage_backends.record import page_digest

MAGIC = b"HXarch\x01\n"
NAMESPACE, PAGE, END = b"HXns", b"HXpg", b"HXen"
_HEAD = struct.Struct(f"<4sQ{NAMESPACE_BYTES}s{KEY_BYTES}s16s16s")
_KINDS = (NAMESPACE, PAGE, END)
MAX_BODY_BYTES = 1 << 30
"""A record that claims more is damaged; nothing is allocated for it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record that proved its header. ``is_sound``: its body is whole and matches its digest."""

    kind: bytes
    namespace: bytes
    key: bytes
    digest: bytes
    body: bytes
    is_sound: bool


class ArchiveWriter:
    """Writes an archive front to back; ``close`` adds the end record. Not thread-safe."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.pages = 0
        file.write(MAGIC)

    def namespace(self, namespace: bytes, fingerprint: Fingerprint) -> None:
        body = fingerprint.canonical()
        self._record(NAMESPACE, namespace, bytes(KEY_BYTES), xxhash.xxh3_128_digest(body), body)

    def page(self, namespace: bytes, key: bytes, digest: bytes, payload: memoryview) -> None:
        """``digest`` was verified by the store the payload came from."""
        self._record(PAGE, namespace, key, digest, payload)
        self.pages += 1

    def close(self) -> None:
        self._record(END, bytes(NAMESPACE_BYTES), self.pages.to_bytes(KEY_BYTES, "little"), bytes(16), b"")

    def _record(self, kind: bytes, namespace: bytes, key: bytes, digest: bytes, body: bytes | memoryview) -> None:
        head = _HEAD.pack(kind, len(body), namespace, key, digest, bytes(16))[:-16]
        self._file.write(head + xxhash.xxh3_128_digest(head))
        self._file.write(body)


def read_archive(file: BinaryIO, where: str) -> Iterator[Record]:
    """Every record whose header proves itself, in order; damage in between is skipped by looking for the next one.

    A body that is cut short or does not match its digest comes with ``is_sound`` False. Raises ConfigError when it
    is not an archive at all.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise ConfigError("not an archive of ours, or of a newer version", where, "name a file that `export` wrote")
    while head := _next_head(file):
        kind, nbytes, namespace, key, digest, _ = _HEAD.unpack(head)
        start = file.tell()
        body = file.read(nbytes)
        is_sound = len(body) == nbytes and _is_sound(kind, namespace, key, digest, body)
        if not is_sound:
            file.seek(start)  # the next record may start inside what this one claimed
        yield Record(kind, namespace, key, digest, body, is_sound)
        if kind == END:
            return


def _next_head(file: BinaryIO) -> bytes:
    """The next header that proves itself; b"" at the end."""
    window = file.read(_HEAD.size)
    if len(window) == _HEAD.size and _proves_itself(window):
        return window
    while True:  # resynchronise
        more = file.read(1 << 20)
        for kind in _KINDS:
            at = window.find(kind)
            while at >= 0:
                head = (window + more)[at : at + _HEAD.size]
                if len(head) == _HEAD.size and _proves_itself(head):
                    file.seek(at + _HEAD.size - len(window) - len(more), 1)
                    return head
                at = window.find(kind, at + 1)
        if not more:
            return b""
        window = window[-(_HEAD.size - 1) :] + more


def _proves_itself(head: bytes) -> bool:
    kind, nbytes, *_, check = _HEAD.unpack(head)
    return kind in _KINDS and nbytes <= MAX_BODY_BYTES and xxhash.xxh3_128_digest(head[:-16]) == check


def _is_sound(kind: bytes, namespace: bytes, key: bytes, digest: bytes, body: bytes) -> bool:
    if kind == PAGE:
        return page_digest(namespace, key, body) == digest
    return kind == END or _is_namespace(namespace, digest, body)


def _is_namespace(namespace: bytes, digest: bytes, body: bytes) -> bool:
    if xxhash.xxh3_128_digest(body) != digest:
        return False
    try:
        return Fingerprint.from_words(json.loads(body)).namespace_id == namespace
    except (ValueError, TypeError, AttributeError):
        return False
