"""Opening a store: can the index be trusted, and if not, a new one from the tables in the segment files.

An unsynced LMDB survives kill -9. It is trusted when this boot has not ended since it was opened (boot id), or when
it was closed cleanly and still has the checksum noted then. Everything here runs while no other process is live.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash
from numpy.typing import NDArray

from sglang_hicache_ext.keys import NAMESPACE_BYTES
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.page import ALIGN
from sglang_hicache_ext.storage_backends.engines.files import LEFTOVER
from sglang_hicache_ext.storage_backends.nvme.index import PAGE, Index, add_namespace
from sglang_hicache_ext.storage_backends.nvme.layout import Layout, sync_directory, write_atomically
from sglang_hicache_ext.storage_backends.nvme.prealloc import preallocate
from sglang_hicache_ext.storage_backends.nvme.segments import Segment, SegmentTable, State, decode_header
from sglang_hicache_ext.storage_backends.nvme.tables import walk

_SEGMENT_NAME = re.compile(r"^(\d{8})\.seg$")
_PUT_SLICE = 100_000
MAX_NAMESPACE_FILES = 32
"""Descriptions kept beside the index, a disk block each, so that they stay within SMALL_FILES_BYTES."""


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def index_checksum(path: Path) -> str:
    """xxh3-128 of data.mdb."""
    state = xxhash.xxh3_128()
    with (path / "data.mdb").open("rb") as file:
        while part := file.read(4 << 20):
            state.update(part)
    return state.hexdigest()


def is_trustworthy(path: Path) -> bool:
    """Whether the index in ``path`` holds what was committed to it."""
    data = path / "data.mdb"
    if not data.exists() or data.stat().st_size < 2 * ALIGN:
        return False
    try:
        clean = json.loads((path / "clean.json").read_bytes())
        return bool(clean["checksum"] == index_checksum(path))
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, OSError):
        return False
    with contextlib.suppress(OSError):
        return (path / "boot").read_text() == boot_id()
    return False


def mark_clean(path: Path) -> None:
    """After the environment is synced and closed by its last user."""
    write_atomically(path / "clean.json", json.dumps({"checksum": index_checksum(path)}).encode())


def mark_running(path: Path) -> None:
    """From here on only this boot's page cache vouches for the index."""
    (path / "clean.json").unlink(missing_ok=True)
    write_atomically(path / "boot", boot_id().encode())
    sync_directory(path)


def open_index(layout: Layout, metrics: Metrics) -> Index:
    """Open the index as the only process; rebuild it when it cannot be trusted. Raises StoreError, OSError."""
    path = layout.index_dir
    if is_trustworthy(path):
        index = _try_open(layout)
        if index is not None:
            mark_running(path)
            return index
    metrics.add("index_rebuilds")
    shutil.rmtree(path)
    path.mkdir(mode=0o700)
    mark_running(path)
    index = Index(path, layout.map_bytes)
    try:
        rebuild(layout, index)
    except BaseException:
        index.close()
        shutil.rmtree(path)
        raise
    return index


def _try_open(layout: Layout) -> Index | None:
    """The index when it opens and its counters agree."""
    index = None
    try:
        index = Index(layout.index_dir, layout.map_bytes)
        live = sum(s.live for s in SegmentTable(index).snapshot())
        if live == index.page_count():
            return index
    except (lmdb.Error, ValueError):
        pass
    if index is not None:
        index.close()
    return None


# ---------------------------------------------------------------------------------------------- segment files


def segment_files(layout: Layout) -> Iterator[tuple[int, Path]]:
    """(number, path) of every segment file where it belongs; anything else of ours in there is removed."""
    for directory in range(len(layout.roots)):
        for entry in list(os.scandir(layout.segment_dir(directory))):
            match = _SEGMENT_NAME.match(entry.name)
            if match and layout.directory_of(int(match[1])) == directory and entry.is_file(follow_symlinks=False):
                yield int(match[1]), Path(entry.path)
            elif match or LEFTOVER.match(entry.name):
                os.unlink(entry.path)


def reconcile(layout: Layout, index: Index, metrics: Metrics) -> None:
    """Make files and index agree: no orphan file, no row without a file, none beyond the capacity, all of full size."""
    for folder in (*layout.roots, layout.index_dir, layout.namespace_dir):
        for entry in list(os.scandir(folder)):
            if LEFTOVER.match(entry.name):
                os.unlink(entry.path)
    table = SegmentTable(index)
    rows = {s.number: s for s in table.snapshot()}
    files = dict(segment_files(layout))
    for number, path in files.items():
        if number not in rows or number >= layout.max_segments:
            path.unlink()
            metrics.add("orphan_segments_removed")
        elif path.stat().st_size != layout.segment_bytes:
            _resize(path, layout.segment_bytes)
    lost = {n for n in rows if n not in files or n >= layout.max_segments}
    if lost:
        forget_segments(index, lost)
        with index.write() as txn:
            for number in lost:
                table.delete(txn, number)
        metrics.add("lost_segments", len(lost))


def _resize(path: Path, nbytes: int) -> None:
    """A truncated file gets its size back; what it lost fails its checksum and is forgotten page by page."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.ftruncate(fd, nbytes)
        with contextlib.suppress(OSError):
            preallocate(fd, nbytes)
    finally:
        os.close(fd)


def forget_segments(index: Index, numbers: set[int]) -> None:
    """Delete every index entry that points into ``numbers``."""
    wanted, after = np.fromiter(numbers, np.uint32), b""
    while batch := index.scan(None, after):
        after = batch[-1][0]
        entries = np.frombuffer(b"".join(v for _, v in batch), PAGE)
        doomed = np.flatnonzero(np.isin(entries["segment"], wanted)).tolist()
        with index.write() as txn:
            for i in doomed:
                txn.delete(batch[i][0], db=index.table(b"pages"))


# ---------------------------------------------------------------------------------------------- rebuild


def rebuild(layout: Layout, index: Index) -> None:
    """Fill an empty index from the segment files, reading headers and tables only."""
    segments: list[Segment] = []
    parts: list[tuple[bytes, Segment, NDArray[np.void]]] = []
    for number, path in sorted(segment_files(layout)):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            segment = decode_header(os.pread(fd, ALIGN, 0), layout.store_id, number)
            if segment is None or number >= layout.max_segments:
                segments.append(Segment(number, State.FREE, 0, 0, 0))
                continue
            segments.append(segment)
            for table in walk(fd, segment.identity(layout.store_id), layout.segment_bytes):
                if len(table.entries):
                    parts.append((table.namespace, segment, table.entries))
        except OSError:  # a bad sector costs what lies behind it, not the store
            if not segments or segments[-1].number != number:
                segments.append(Segment(number, State.FREE, 0, 0, 0))
        finally:
            os.close(fd)
    numbers = _register(layout, index, {ns_id for ns_id, _, _ in parts})
    live = _put_pages(index, parts, numbers)
    _put_segments(index, segments, live)


def _register(layout: Layout, index: Index, found: set[bytes]) -> dict[bytes, int]:
    words = dict(stored_namespaces(layout))
    table = index.table(b"namespaces")
    with index.write() as txn:
        return {ns_id: add_namespace(txn, table, ns_id, words.get(ns_id)) for ns_id in sorted(found | set(words))}


def _put_pages(
    index: Index, parts: list[tuple[bytes, Segment, NDArray[np.void]]], numbers: dict[bytes, int]
) -> dict[int, int]:
    """Sort all pages by key, keep the youngest of equal ones, and append them. Returns live pages per segment."""
    total = sum(len(e) for _, _, e in parts)
    keys, pages = np.empty((total, 36), np.uint8), np.zeros(total, PAGE)
    age = np.empty(total, np.uint64)
    at = 0
    for ns_id, segment, entries in parts:
        span = slice(at, at + len(entries))
        keys[span, :4] = np.frombuffer(numbers[ns_id].to_bytes(4, "big"), np.uint8)
        keys[span, 4:] = np.frombuffer(entries["key"].tobytes(), np.uint8).reshape(-1, 32)
        pages["segment"][span], pages["generation"][span] = segment.number, segment.generation
        for name in ("block", "nbytes", "digest"):
            pages[name][span] = entries[name]
        age[span] = segment.sequence
        at = span.stop
    order = _order(keys, age, pages["block"])
    keys, pages = keys[order], pages[order]
    if total:
        last = np.append((keys[1:] != keys[:-1]).any(axis=1), True)
        keys, pages = keys[last], pages[last]
    _append(index, keys, pages)
    counted = zip(*np.unique(pages["segment"], return_counts=True), strict=True)
    return {int(s): int(c) for s, c in counted}


def _order(keys: NDArray[np.uint8], age: NDArray[np.uint64], block: NDArray[np.uint32]) -> NDArray[np.int64]:
    """By key as LMDB compares them, equal keys by age."""
    columns = [np.ascontiguousarray(keys[:, a : a + 8]).view(">u8")[:, 0].astype(np.uint64) for a in (28, 20, 12, 4)]
    number = np.ascontiguousarray(keys[:, :4]).view(">u4")[:, 0].astype(np.uint32)
    return np.lexsort([block.astype(np.uint64), age, *columns, number.astype(np.uint64)])


def _append(index: Index, keys: NDArray[np.uint8], pages: NDArray[np.void]) -> None:
    size = PAGE.itemsize
    for start in range(0, len(keys), _PUT_SLICE):
        key_raw, page_raw = keys[start : start + _PUT_SLICE].tobytes(), pages[start : start + _PUT_SLICE].tobytes()
        items = [
            (key_raw[36 * i : 36 * i + 36], page_raw[size * i : size * i + size]) for i in range(len(key_raw) // 36)
        ]
        with index.write() as txn:
            txn.cursor(index.table(b"pages")).putmulti(items, append=True)


def _put_segments(index: Index, segments: list[Segment], live: dict[int, int]) -> None:
    table = SegmentTable(index)
    with index.write() as txn:
        for segment in segments:
            count = live.get(segment.number, 0)
            table.put(txn, replace(segment, live=count, state=State.SEALED if count else State.FREE))
        newest = max((s.sequence for s in segments), default=0)
        txn.put(b"sequence", newest.to_bytes(8, "little"), db=index.table(b"meta"))


# ---------------------------------------------------------------------------------------------- namespaces in words


def store_namespace(layout: Layout, ns_id: bytes, words: dict[str, Any]) -> None:
    """Keep a fingerprint in words beside the index, so that it outlives it."""
    path = layout.namespace_dir / f"{ns_id.hex()}.json"
    if path.exists():
        with contextlib.suppress(OSError):
            os.utime(path)
        return
    _drop_oldest_words(layout.namespace_dir)
    write_atomically(path, json.dumps(words, indent=1, sort_keys=True).encode())


def _drop_oldest_words(folder: Path) -> None:
    """Every weight update makes new namespaces: keep the words of the latest used; the index still has all."""
    ages: list[tuple[int, Path]] = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):  # another process may drop some too
            ages.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(ages)[: max(0, len(ages) - MAX_NAMESPACE_FILES + 1)]:
        path.unlink(missing_ok=True)


def stored_namespaces(layout: Layout) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for path in sorted(layout.namespace_dir.glob("*.json")):
        with contextlib.suppress(ValueError, OSError):
            ns_id, words = bytes.fromhex(path.stem), json.loads(path.read_bytes())
            if len(ns_id) == NAMESPACE_BYTES and isinstance(words, dict):
                yield ns_id, words
