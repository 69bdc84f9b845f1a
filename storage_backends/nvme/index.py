"""The index: LMDB, one environment per path and process, shared by every process on the directory.

    pages       (namespace number u32 big-endian, key 32 B) -> PAGE (32 bytes)
    namespaces  namespace id 16 B -> number u32, fingerprint as JSON
    segments    segment number u32 big-endian -> SEGMENT (see segments.py)
    meta        b"sequence" -> u64

Unsynced: a commit is in the page cache, so it survives kill -9 but not power loss (recovery.py).
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import StoreError
from sglang_hicache_ext.keys import KEY_BYTES

PAGE = np.dtype([("segment", "<u4"), ("generation", "<u4"), ("block", "<u4"), ("nbytes", "<u4"), ("digest", "V16")])
_NO_PAGE = bytes(PAGE.itemsize)
Change = tuple[bytes, bool]
"""(full key, True: published, False: removed)."""
_NUMBER = struct.Struct(">I")
_U64 = struct.Struct("<Q")
TREE_SHARE = 0.7
"""Of the map, for the pages tree. LMDB copies what a transaction changes, also when it deletes: the rest is for that."""
BYTES_PER_PAGE = 150
"""Of the tree, per entry: 76 bytes, and leaves that random inserts and deletes keep about half full."""
_SPARE_TXNS = 32
TABLES = (b"pages", b"namespaces", b"segments", b"meta")


@dataclass(slots=True)
class _Shared:
    env: Any
    tables: dict[bytes, Any]
    users: int = 0
    write_lock: threading.Lock = field(default_factory=threading.Lock)


_open: dict[tuple[int, int, int], _Shared] = {}
_open_lock = threading.Lock()


def _attach(path: Path, map_bytes: int) -> tuple[tuple[int, int, int], _Shared]:
    """LMDB must not be opened twice in one process, so stores on one path share the environment (by device and inode);
    the process id is part of the key because an environment must not cross a fork."""
    info = path.stat()
    ident = (os.getpid(), info.st_dev, info.st_ino)
    with _open_lock:
        shared = _open.get(ident)
        if shared is None:
            env = lmdb.open(
                str(path), map_size=map_bytes, max_dbs=8, mode=0o600, create=True, sync=False, metasync=False,
                readahead=False, max_readers=1024, max_spare_txns=_SPARE_TXNS,
            )  # fmt: skip
            try:
                env.reader_check()
                shared = _Shared(env, {name: env.open_db(name) for name in TABLES})
            except BaseException:
                env.close()
                raise
            _open[ident] = shared
        shared.users += 1
        return ident, shared


class Index:
    """Thread-safe. Reads never block; write transactions exclude each other over all processes."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        """Raises lmdb.Error when the environment cannot be opened."""
        self._ident, self._shared = _attach(path, map_bytes)
        self.path = path
        self._env = self._shared.env
        self._pages = self._shared.tables[b"pages"]
        self._closed = False
        self._most_pages = int(map_bytes * TREE_SHARE) // BYTES_PER_PAGE
        self.slice_keys = max(16, min(4096, map_bytes // 4096 // 16))
        """Most random keys changed in one transaction, so that its copies are a small part of the map."""
        self.listener: Callable[[list[Change]], None] | None = None
        """Hears of each committed change while other writers of this process still wait, so in the order of the commits.
        It must be quick and must not raise."""
        self._changes: list[Change] = []

    # -------------------------------------------------------------------------------------------- transactions

    @contextmanager
    def write(self) -> Iterator[Any]:
        """A write transaction; commits at the end, aborts on an exception."""
        self._check_process()
        with self._shared.write_lock:
            try:
                with self._env.begin(write=True) as txn:
                    yield txn
                if self._changes and self.listener is not None:
                    self.listener(self._changes)
            finally:
                self._changes = []

    def table(self, name: bytes) -> Any:
        return self._shared.tables[name]

    def _check_process(self) -> None:
        if self._ident[0] != os.getpid():
            raise StoreError(
                "open", "the store was opened before a fork; use a spawned child and open it there", path=str(self.path)
            )

    def read(self) -> Any:
        """A read transaction, to be used as a context manager and kept short."""
        self._check_process()
        for _ in range(_SPARE_TXNS):
            try:
                return self._env.begin()
            except lmdb.BadRslotError:  # a forked child that ended took the reader slot of an idle transaction with it
                continue
        return self._env.begin()

    # -------------------------------------------------------------------------------------------- pages

    def lookup(self, number: int, keys: Sequence[bytes]) -> tuple[NDArray[np.bool_], NDArray[np.void]]:
        """([keys] bool found, [keys] PAGE); entries that are not found are zero."""
        values = self._values(number, keys)
        raw = b"".join(values)
        if len(raw) != len(keys) * PAGE.itemsize:  # an index that holds other lengths is damaged: those are no pages
            raw = b"".join(v if len(v) == PAGE.itemsize else _NO_PAGE for v in values)
        entries = np.frombuffer(raw, PAGE)
        return entries["nbytes"] != 0, entries

    def contains(self, number: int, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """[keys] bool."""
        prefix = _NUMBER.pack(number)
        with self.read() as txn:
            find = txn.cursor(self._pages).set_key  # no value is copied: 7 % less than getmulti at 1 M pages
            return np.asarray([find(prefix + k) for k in keys], np.bool_)

    def _values(self, number: int, keys: Sequence[bytes]) -> list[bytes]:
        full, found = self._get(number, keys)
        if len(found) == len(full):  # the answer keeps the order of the question
            return [value for _, value in found]
        get = dict(found).get
        return [get(k, _NO_PAGE) for k in full]

    def _get(self, number: int, keys: Sequence[bytes]) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
        """(full keys, those found with their values), in one cursor call."""
        prefix = _NUMBER.pack(number)
        full = [prefix + k for k in keys]
        if not full:
            return full, []
        with self.read() as txn:
            return full, txn.cursor(self._pages).getmulti(full)

    def put_new(self, txn: Any, number: int, keys: Sequence[bytes], entries: NDArray[np.void]) -> NDArray[np.bool_]:
        """Insert pages that are not there yet; [keys] bool: inserted. A page already there is left alone.

        Raises lmdb.MapFullError when the index has grown to its limit.
        """
        if int(txn.stat(self._pages)["entries"]) > self._most_pages:
            raise lmdb.MapFullError("the index has grown to its limit")
        prefix = _NUMBER.pack(number)
        raw = entries.tobytes()
        size = PAGE.itemsize
        put, table = txn.put, self._pages
        new = np.fromiter(
            (put(prefix + k, raw[i * size : (i + 1) * size], overwrite=False, db=table) for i, k in enumerate(keys)),
            np.bool_,
            len(keys),
        )
        if self.listener is not None:
            self._changes += [(prefix + keys[i], True) for i in np.flatnonzero(new).tolist()]
        return new

    def swap(
        self, txn: Any, number: int, keys: Sequence[bytes], old: NDArray[np.void], new: NDArray[np.void] | None
    ) -> NDArray[np.bool_]:
        """Replace (``new`` None: delete) each entry that still equals ``old``; [keys] bool: done."""
        prefix = _NUMBER.pack(number)
        before = old.tobytes()
        after = b"" if new is None else new.tobytes()
        size, table = PAGE.itemsize, self._pages
        done = np.zeros(len(keys), np.bool_)
        for i, key in enumerate(keys):
            full = prefix + key
            if txn.get(full, db=table) != before[i * size : (i + 1) * size]:
                continue
            if new is None:
                txn.delete(full, db=table)
            else:
                txn.put(full, after[i * size : (i + 1) * size], db=table)
            done[i] = True
        if new is None and self.listener is not None:
            self._changes += [(prefix + keys[i], False) for i in np.flatnonzero(done).tolist()]
        return done

    def delete_unchanged(self, txn: Any, batch: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        """Delete raw (full key, value) that are still so; returns the values that went."""
        table = self._pages
        gone = [(k, v) for k, v in batch if txn.get(k, db=table) == v and txn.delete(k, db=table)]
        if self.listener is not None:
            self._changes += [(key, False) for key, _ in gone]
        return [value for _, value in gone]

    def contains_heads(self, number: int, heads: Sequence[bytes]) -> NDArray[np.bool_]:
        """[heads] bool: a key that begins with these bytes is there."""
        prefix = _NUMBER.pack(number)
        with self.read() as txn:
            cursor = txn.cursor(self._pages)
            return np.fromiter(
                (cursor.set_range(prefix + h) and cursor.key().startswith(prefix + h) for h in heads),
                np.bool_,
                len(heads),
            )

    def page_count(self) -> int:
        with self.read() as txn:
            return int(txn.stat(self._pages)["entries"])

    def scan(self, number: int | None, after: bytes = b"", limit: int = 8192) -> list[tuple[bytes, bytes]]:
        """Up to ``limit`` raw (full key, value) behind ``after``, of one namespace or all."""
        prefix = b"" if number is None else _NUMBER.pack(number)
        out: list[tuple[bytes, bytes]] = []
        with self.read() as txn:
            cursor = txn.cursor(self._pages)
            there = cursor.set_range(after or prefix)
            if there and after and cursor.key() == after:
                there = cursor.next()
            if there:
                for key, value in cursor.iternext():
                    if len(out) == limit or not key.startswith(prefix):
                        break
                    out.append((key, value))
        return out

    # -------------------------------------------------------------------------------------------- namespaces

    def namespace_number(self, ns_id: bytes, words: dict[str, Any] | None) -> int:
        """The number of a namespace, registered when new (``words`` None: unknown until somebody names it)."""
        table = self.table(b"namespaces")
        with self.read() as txn:
            raw = txn.get(ns_id, db=table)
        if raw is not None and (words is None or len(raw) > 4):
            return int(_NUMBER.unpack_from(raw)[0])
        with self.write() as txn:
            return add_namespace(txn, table, ns_id, words)

    def namespaces(self, youngest: int | None = None) -> list[tuple[bytes, int, dict[str, Any] | None]]:
        """(id, number, fingerprint in words or None when they are not known) of all, or of the ``youngest`` so many."""
        with self.read() as txn:
            rows = list(txn.cursor(self.table(b"namespaces")))
        if youngest is not None:  # words are decoded for these only: every weight update leaves some more
            rows = sorted(rows, key=lambda row: row[1][:4])[-youngest:]
        return [(ns_id, int(_NUMBER.unpack_from(raw)[0]), _words(raw[4:])) for ns_id, raw in rows]

    def namespace_numbers(self) -> dict[bytes, int]:
        """The number of each namespace id."""
        with self.read() as txn:
            rows = list(txn.cursor(self.table(b"namespaces")))
        return {ns_id: int(_NUMBER.unpack_from(raw)[0]) for ns_id, raw in rows}

    # -------------------------------------------------------------------------------------------- life

    @property
    def bytes_on_disk(self) -> int:
        return sum(os.stat(self.path / name).st_blocks * 512 for name in ("data.mdb", "lock.mdb"))

    def sync(self) -> None:
        self._env.sync(True)

    def forget_dead_readers(self) -> None:
        """A process killed inside a read transaction keeps every page freed since from being used again."""
        self._env.reader_check()

    def close(self) -> bool:
        """Idempotent. True when this was the process's last user of the environment and it is closed."""
        with _open_lock:
            if self._closed or self._ident[0] != os.getpid():
                return False
            self._closed = True
            self._shared.users -= 1
            if self._shared.users:
                return False
            del _open[self._ident]
            self._env.close()
            return True


def add_namespace(txn: Any, table: Any, ns_id: bytes, words: dict[str, Any] | None) -> int:
    raw = txn.get(ns_id, db=table)
    number = int(_NUMBER.unpack_from(raw)[0]) if raw else int(txn.stat(table)["entries"]) + 1
    text = json.dumps(words, sort_keys=True).encode() if words is not None else (raw[4:] if raw else b"")
    txn.put(ns_id, _NUMBER.pack(number) + text, db=table)
    return number


def _words(raw: bytes) -> dict[str, Any] | None:
    try:
        words = json.loads(raw) if raw else None
    except ValueError:
        return None
    return words if isinstance(words, dict) else None


def split_key(full: bytes) -> tuple[int, bytes]:
    """(namespace number, key) of a key of the ``pages`` table."""
    return int(_NUMBER.unpack_from(full)[0]), full[4 : 4 + KEY_BYTES]


def next_sequence(txn: Any, table: Any) -> int:
    """A number that rises with every segment that is put to use."""
    raw = txn.get(b"sequence", db=table)
    value = (_U64.unpack(raw)[0] if raw else 0) + 1
    txn.put(b"sequence", _U64.pack(value), db=table)
    return int(value)
