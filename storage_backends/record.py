"""The self-proving page record, shared by every tier: a page's digest, and the table that heads a batch on disk.

A page's digest is xxh3-128 over (namespace id, key, payload length) and then the payload, streamed over its regions in
order. It is checked with the namespace and key that were *asked for*, so bytes of another page, a reused segment, a
swapped index entry and a flipped bit all fail it. xxh3 is not a defence against someone who can write to the directory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from sglang_hicache_ext.keys import KEY_BYTES, NAMESPACE_BYTES
from sglang_hicache_ext.page import ALIGN, Regions, align_up

RECORD_VERSION = 1
DIGEST_BYTES = 16
MAX_PAGE_BYTES = (1 << 32) - ALIGN
MAX_TABLE_PAGES = 1 << 16
"""A table that claims more is refused before anything is allocated for it."""

_PAGE_HEADER = struct.Struct(f"<4sI{NAMESPACE_BYTES}s{KEY_BYTES}sQ")
_PAGE_MAGIC = b"HXp1"

# One view over the whole user address space: cutting a page's piece out of it costs 0.1 us, a ctypes array per
# piece 0.8 us and a new type per size. Nothing is touched until a slice of it is read.
_LOW = 4096
_SPACE = memoryview((ctypes.c_char * ((1 << 62) - _LOW)).from_address(_LOW)).cast("B")


def memory_at(addr: int, nbytes: int) -> memoryview:
    """A writable view of ``nbytes`` at ``addr``. The caller keeps the memory alive."""
    start = addr - _LOW
    return _SPACE[start : start + nbytes]


def page_header(namespace: bytes, key: bytes, nbytes: int) -> bytes:
    """The bytes that are hashed ahead of the payload."""
    return _PAGE_HEADER.pack(_PAGE_MAGIC, RECORD_VERSION, namespace, key, nbytes)


def merge_columns(regions: Regions) -> Regions:
    """Join neighbouring regions that are adjacent in memory in every page; the bytes and their order stay."""
    if len(regions.sizes) == 1 or not len(regions):
        return regions
    ends = regions.addrs[:, :-1] + regions.sizes[:-1].astype(np.uint64)
    joined = (ends == regions.addrs[:, 1:]).all(axis=0)
    if not joined.any():
        return regions
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    sizes = np.add.reduceat(regions.sizes, first)
    return Regions(np.ascontiguousarray(regions.addrs[:, first]), sizes, regions.owner)


class PageDigests:
    """Digests of the pages of one call; the per-call work (merging, lists of integers) is done once.

    Not tied to a thread. Hashing releases the interpreter lock for payloads worth it.
    """

    __slots__ = ("_addrs", "_keys", "_nbytes", "_prefix", "_sizes")

    def __init__(self, namespace: bytes, keys: Sequence[bytes], regions: Regions) -> None:
        merged = merge_columns(regions)
        self._keys = keys
        self._nbytes = regions.page_bytes
        self._prefix = namespace
        self._sizes = merged.sizes.tolist()
        starts = merged.addrs.astype(np.int64) - _LOW
        self._addrs = starts[:, 0].tolist() if len(self._sizes) == 1 else starts.tolist()

    def digest(self, page: int) -> bytes:
        """DIGEST_BYTES bytes for page number ``page`` of the call."""
        state = xxhash.xxh3_128(page_header(self._prefix, self._keys[page], self._nbytes))
        if len(self._sizes) == 1:
            start = self._addrs[page]
            state.update(_SPACE[start : start + self._nbytes])
        else:
            for start, size in zip(self._addrs[page], self._sizes, strict=True):
                state.update(_SPACE[start : start + size])
        return state.digest()


def page_digest(namespace: bytes, key: bytes, payload: memoryview | bytes) -> bytes:
    """The digest of one page whose payload is contiguous."""
    state = xxhash.xxh3_128(page_header(namespace, key, len(payload)))
    state.update(payload)
    return state.digest()


# ---------------------------------------------------------------------------------------------- batch table

TABLE_MAGIC = b"HXtable\x01"
_TABLE_HEADER = struct.Struct(f"<8sIIII16sQQ{NAMESPACE_BYTES}sQ32x16s")
TABLE_HEADER_BYTES = _TABLE_HEADER.size
ENTRY = np.dtype(
    [("key", "V32"), ("digest", "V16"), ("block", "<u4"), ("nbytes", "<u4"), ("reserved", "<u8")],
)
assert TABLE_HEADER_BYTES == 128 and ENTRY.itemsize == 64


@dataclass(frozen=True, slots=True)
class SegmentIdentity:
    """What ties a table to one life of one segment file; payload bytes cannot guess ``nonce``."""

    store_id: bytes
    segment: int
    generation: int
    nonce: int


@dataclass(frozen=True, slots=True)
class Table:
    """The head of a batch. ``extent_bytes`` counts from ``offset`` to the next table.

    ``entries`` is empty for a table that only skips space (a failed batch, the end of a sealed segment).
    """

    namespace: bytes
    offset: int
    extent_bytes: int
    entries: NDArray[np.void]


def table_bytes(pages: int) -> int:
    """Bytes on disk of the table of ``pages`` pages."""
    return align_up(TABLE_HEADER_BYTES + pages * ENTRY.itemsize)


def encode_table(seg: SegmentIdentity, table: Table, out: memoryview) -> None:
    """Write ``table`` into ``out``, which has exactly ``table_bytes(len(table.entries))`` bytes."""
    n = len(table.entries)
    body = table.entries.tobytes()
    head = _TABLE_HEADER.pack(
        TABLE_MAGIC, RECORD_VERSION, n, seg.segment, seg.generation, seg.store_id, table.offset,
        table.extent_bytes, table.namespace, seg.nonce, bytes(16),
    )  # fmt: skip
    state = xxhash.xxh3_128(head)
    state.update(body)
    end = TABLE_HEADER_BYTES + len(body)
    out[: TABLE_HEADER_BYTES - 16] = head[:-16]
    out[TABLE_HEADER_BYTES - 16 : TABLE_HEADER_BYTES] = state.digest()
    out[TABLE_HEADER_BYTES:end] = body
    out[end:] = bytes(len(out) - end)


def table_pages(seg: SegmentIdentity, head: bytes | memoryview, offset: int, limit: int) -> int:
    """Pages that the table starting with ``head`` claims, or -1 when it is not a sane table of this segment.

    Args:
        head: at least TABLE_HEADER_BYTES bytes.
        offset: where the bytes were found; a table says where it lies.
        limit: end of the segment in bytes.
    """
    if len(head) < TABLE_HEADER_BYTES or bytes(head[:8]) != TABLE_MAGIC:
        return -1
    _, version, n, segment, generation, store, at, extent, _, nonce, _ = _TABLE_HEADER.unpack_from(head)
    if version != RECORD_VERSION or n > MAX_TABLE_PAGES or at != offset or nonce != seg.nonce:
        return -1
    if (segment, generation, store) != (seg.segment, seg.generation, seg.store_id):
        return -1
    if extent % ALIGN or not table_bytes(n) <= extent <= limit - offset:
        return -1
    return int(n)


def decode_table(seg: SegmentIdentity, raw: bytes | memoryview, offset: int, limit: int) -> Table | None:
    """The table at the start of ``raw``, or None: bad magic, another version or segment, lengths that do not fit, bad
    checksum, entries outside the extent. Allocates nothing that ``raw`` does not already hold."""
    n = table_pages(seg, raw, offset, limit)
    if n < 0:
        return None
    end = TABLE_HEADER_BYTES + n * ENTRY.itemsize
    if len(raw) < end:
        return None
    state = xxhash.xxh3_128(bytes(raw[: TABLE_HEADER_BYTES - 16]) + bytes(16))
    state.update(raw[TABLE_HEADER_BYTES:end])
    if state.digest() != bytes(raw[TABLE_HEADER_BYTES - 16 : TABLE_HEADER_BYTES]):
        return None
    _, _, _, _, _, _, _, extent, namespace, _, _ = _TABLE_HEADER.unpack_from(raw)
    entries = np.frombuffer(raw, ENTRY, n, TABLE_HEADER_BYTES)
    starts = entries["block"].astype(np.int64) * ALIGN
    ends = starts + entries["nbytes"]
    if n and ((starts < offset + table_bytes(n)).any() or (ends > offset + extent).any()):
        return None
    return Table(namespace, offset, extent, entries)
