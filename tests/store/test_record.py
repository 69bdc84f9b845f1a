"""The page digest and the batch table: what is hashed, and that hostile bytes are refused without allocating."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hicache_ext.page import ALIGN, Regions, regions_of_array
from sglang_hicache_ext.storage_backends.record import (
    ENTRY,
    MAX_TABLE_PAGES,
    TABLE_HEADER_BYTES,
    PageDigests,
    SegmentIdentity,
    Table,
    decode_table,
    encode_table,
    merge_columns,
    page_digest,
    table_bytes,
    table_pages,
)

SEGMENT = SegmentIdentity(b"store-id-16bytes", 3, 7, 0x1234567890ABCDEF)
LIMIT = 1 << 30
OFFSET = 8192
NAMESPACE = b"namespace-16byte"


def make_table(pages: int, page_bytes: int = 16_384) -> tuple[Table, bytearray]:
    entries = np.zeros(pages, ENTRY)
    entries["key"] = [bytes([i % 256]) * 32 for i in range(pages)]
    entries["nbytes"] = page_bytes
    entries["block"] = (OFFSET + table_bytes(pages)) // ALIGN + np.arange(pages) * (page_bytes // ALIGN)
    table = Table(NAMESPACE, OFFSET, table_bytes(pages) + pages * page_bytes, entries)
    raw = bytearray(table_bytes(pages))
    encode_table(SEGMENT, table, memoryview(raw))
    return table, raw


@pytest.mark.parametrize("pages", [0, 1, 2, 62, 63, 128, 1000])
def test_a_table_comes_back_as_it_was(pages: int) -> None:
    table, raw = make_table(pages)
    assert len(raw) % ALIGN == 0
    back = decode_table(SEGMENT, raw, OFFSET, LIMIT)
    assert back is not None and (back.namespace, back.offset, back.extent_bytes) == (
        table.namespace,
        table.offset,
        table.extent_bytes,
    )
    assert (back.entries == table.entries).all()


@given(position=st.integers(0, TABLE_HEADER_BYTES + 5 * 64 - 1), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_of_a_table_is_refused(position: int, bit: int) -> None:
    _, raw = make_table(5)
    raw[position] ^= 1 << bit
    assert decode_table(SEGMENT, raw, OFFSET, LIMIT) is None


@given(st.binary(max_size=600))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_no_table(raw: bytes) -> None:
    assert decode_table(SEGMENT, raw, OFFSET, LIMIT) is None
    assert decode_table(SEGMENT, b"HXtable\x01" + raw, OFFSET, LIMIT) is None


@pytest.mark.parametrize("cut", [0, 7, 127, 128, 191, 4095])
def test_a_truncated_table_is_refused(cut: int) -> None:
    _, raw = make_table(100)
    assert decode_table(SEGMENT, bytes(raw[:cut]), OFFSET, LIMIT) is None


@pytest.mark.parametrize(
    "other",
    [
        SegmentIdentity(b"another-store-16", 3, 7, SEGMENT.nonce),
        SegmentIdentity(SEGMENT.store_id, 4, 7, SEGMENT.nonce),
        SegmentIdentity(SEGMENT.store_id, 3, 8, SEGMENT.nonce),
        SegmentIdentity(SEGMENT.store_id, 3, 7, SEGMENT.nonce + 1),
    ],
)
def test_a_table_of_another_segment_or_life_is_refused(other: SegmentIdentity) -> None:
    _, raw = make_table(5)
    assert decode_table(other, raw, OFFSET, LIMIT) is None


def test_a_table_that_was_copied_elsewhere_is_refused() -> None:
    """A page's payload may hold a valid table; it says where it lies, and that is not here."""
    _, raw = make_table(5)
    assert decode_table(SEGMENT, raw, OFFSET + ALIGN, LIMIT) is None
    assert decode_table(SEGMENT, raw, OFFSET, OFFSET + len(raw)) is None, "its extent leaves the segment"


def test_huge_counts_allocate_nothing() -> None:
    _, raw = make_table(5)
    for pages in (MAX_TABLE_PAGES + 1, 0x7FFFFFFF, 0xFFFFFFFF):
        raw[12:16] = pages.to_bytes(4, "little")
        tracemalloc.start()
        assert table_pages(SEGMENT, raw, OFFSET, LIMIT) == -1
        assert decode_table(SEGMENT, raw, OFFSET, LIMIT) is None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 65_536


def test_entries_outside_the_extent_are_refused() -> None:
    for field, value in (("block", 1), ("block", 0xFFFFFFFF), ("nbytes", 0xFFFFFFFF)):
        table, raw = make_table(5)
        entries = table.entries.copy()
        entries[field][2] = value
        encode_table(SEGMENT, Table(NAMESPACE, OFFSET, table.extent_bytes, entries), memoryview(raw))
        assert decode_table(SEGMENT, raw, OFFSET, LIMIT) is None, (field, value)


@given(cuts=st.lists(st.integers(1, 500), min_size=1, max_size=6), pages=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_digest_does_not_depend_on_how_a_page_is_cut(cuts: list[int], pages: int) -> None:
    rng = np.random.default_rng(sum(cuts))
    array = rng.integers(0, 256, (pages, sum(cuts)), dtype=np.uint8)
    keys = [bytes([i]) * 32 for i in range(pages)]
    cut = PageDigests(NAMESPACE, keys, regions_of_array(array, tuple(cuts)))
    for i in range(pages):
        assert cut.digest(i) == page_digest(NAMESPACE, keys[i], array[i].tobytes())


def test_the_digest_covers_namespace_key_length_and_every_byte() -> None:
    payload = bytearray(range(256)) * 4
    base = page_digest(NAMESPACE, b"k" * 32, bytes(payload))
    seen = {base, page_digest(b"x" * 16, b"k" * 32, bytes(payload)), page_digest(NAMESPACE, b"l" * 32, bytes(payload))}
    seen.add(page_digest(NAMESPACE, b"k" * 32, bytes(payload) + b"\0"))
    for at in range(0, len(payload), 37):
        payload[at] ^= 1
        seen.add(page_digest(NAMESPACE, b"k" * 32, bytes(payload)))
        payload[at] ^= 1
    assert len(seen) == 4 + len(range(0, len(payload), 37))


def test_columns_are_joined_only_where_every_page_is_adjacent() -> None:
    array = np.zeros((3, 64), np.uint8)
    whole = merge_columns(regions_of_array(array, (16, 16, 32)))
    assert whole.sizes.tolist() == [64] and whole.addrs[:, 0].tolist() == regions_of_array(array).addrs[:, 0].tolist()
    addrs = regions_of_array(array, (16, 16, 32)).addrs.copy()
    addrs[1, 1] += np.uint64(1)
    apart = merge_columns(Regions(addrs, np.asarray([16, 16, 32], np.int64)))
    assert apart.sizes.tolist() == [16, 16, 32]
