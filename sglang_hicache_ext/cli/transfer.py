"""`hicache-ext export` and `import`: chosen pages to a file and back, checked on both ends."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sglang_hicache_ext.cli.offline import handle_of, open_existing, pick_namespaces
from sglang_hicache_ext.cli.render import FINDINGS, OK, Output, size_text
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import Fingerprint, hash_chain, key_bytes
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.archive import END, NAMESPACE, PAGE, ArchiveWriter, Record, read_archive
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.storage_backends.nvme.survey import NamespaceSurvey
from sglang_hicache_ext.storage_backends.record import page_digest

WAVE = 64


def export(paths: list[str], target: Path, namespace: str, tokens: Sequence[int], only_read: bool, out: Output) -> int:
    """Write pages to ``target``: of matching namespaces, of one prompt's pages, of pages that were read.

    The file appears under its name only when it is whole.
    """
    if target.exists():
        raise ConfigError("file exists", str(target), "name a new file")
    tally: Counter[str] = Counter()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file, open_existing(paths) as store:
            writer = ArchiveWriter(file)
            for found in pick_namespaces(store, namespace):
                _export(store, found, writer, tokens, only_read, tally, out)
            writer.close()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return _report(f"{target}: {size_text(target.stat().st_size)}", tally, out)


def _export(
    store: NvmeStore, found: NamespaceSurvey, writer: ArchiveWriter, tokens: Sequence[int], only_read: bool,
    tally: Counter[str], out: Output,
) -> None:  # fmt: skip
    ns, number = handle_of(store, found), store.number_of(found.id)
    wanted = {key_bytes(k) for k in hash_chain(tokens, max(1, ns.fingerprint.page_tokens))} if tokens else None
    if number is None or not found.pages:
        return
    writer.namespace(ns.id, ns.fingerprint)
    waiting: dict[int, list[bytes]] = {}
    with out.progress(f"exporting {found.id.hex()[:8]}", found.pages) as advance:
        for page in store.survey().pages(number):
            advance(1)
            if (wanted is not None and page.key not in wanted) or (only_read and not page.was_read):
                continue
            same = waiting.setdefault(page.nbytes, [])
            same.append(page.key)
            if len(same) == WAVE:
                _copy_out(store, ns, waiting.pop(page.nbytes), page.nbytes, writer, tally)
        for nbytes, keys in waiting.items():
            _copy_out(store, ns, keys, nbytes, writer, tally)


def _copy_out(
    store: NvmeStore, ns: Namespace, keys: list[bytes], nbytes: int, writer: ArchiveWriter, tally: Counter[str]
) -> None:
    memory = np.empty((len(keys), nbytes), np.uint8)
    result = store.read(ns, keys, regions_of_array(memory))
    for row, (key, outcome) in enumerate(zip(keys, result.outcomes, strict=True)):
        tally["exported" if outcome is Outcome.LOADED else str(outcome)] += 1
        if outcome is Outcome.LOADED:
            payload = memoryview(memory[row])
            writer.page(ns.id, key, page_digest(ns.id, key, payload), payload)


def load(paths: list[str], source: Path, out: Output) -> int:
    """Take the pages of ``source`` into the store; a damaged page is refused, the others go on."""
    tally: Counter[str] = Counter()
    try:
        file = source.open("rb")
    except OSError as err:
        raise ConfigError(f"cannot read the archive: {err.strerror}", str(source), "name a readable file") from err
    with file, open_existing(paths) as store, out.progress("importing", source.stat().st_size) as advance:
        intake = _Intake(store, tally)
        at = 0
        for record in read_archive(file, str(source)):
            intake.take(record)
            advance(file.tell() - at)
            at = file.tell()
        intake.finish()
    return _report(f"{source}", tally, out)


class _Intake:
    """Collects checked pages of equal size and writes them in batches."""

    def __init__(self, store: NvmeStore, tally: Counter[str]) -> None:
        self._store, self._tally = store, tally
        self._namespaces: dict[bytes, Namespace] = {}
        self._waiting: dict[tuple[bytes, int], list[tuple[bytes, bytes]]] = {}
        self._pages = 0
        self._promised: int | None = None

    def take(self, record: Record) -> None:
        kinds: dict[bytes, Callable[[Record], None]] = {NAMESPACE: self._namespace, PAGE: self._page, END: self._end}
        kinds[record.kind](record)

    def _namespace(self, record: Record) -> None:
        if record.is_sound:
            self._namespaces[record.namespace] = self._store.namespace(Fingerprint.from_words(json.loads(record.body)))

    def _page(self, record: Record) -> None:
        self._pages += 1
        ns = self._namespaces.get(record.namespace)
        if ns is None:
            self._tally["refused: unknown namespace"] += 1
        elif not record.is_sound:
            self._tally["refused: corrupt"] += 1
        else:
            same = self._waiting.setdefault((ns.id, len(record.body)), [])
            same.append((record.key, record.body))
            if len(same) == WAVE:
                self._write(ns.id, len(record.body))

    def _end(self, record: Record) -> None:
        self._promised = int.from_bytes(record.key, "little")

    def finish(self) -> None:
        for ns_id, nbytes in list(self._waiting):
            self._write(ns_id, nbytes)
        if self._promised is None:
            self._tally["refused: the archive is cut short"] += 1
        elif self._promised > self._pages:
            self._tally["refused: page lost"] += self._promised - self._pages

    def _write(self, ns_id: bytes, nbytes: int) -> None:
        pages = self._waiting.pop((ns_id, nbytes))
        memory = np.frombuffer(b"".join(body for _, body in pages), np.uint8).reshape(len(pages), nbytes)
        result = self._store.write(self._namespaces[ns_id], [key for key, _ in pages], regions_of_array(memory))
        self._tally.update(str(o) for o in result.outcomes)


def _report(what: str, tally: Counter[str], out: Output) -> int:
    out.document({"what": what, "outcomes": dict(tally)})
    out.line(f"{what}: {', '.join(f'{n} {o}' for o, n in sorted(tally.items())) or 'no page'}")
    good = {"exported", "stored", "present"}
    return OK if set(tally) <= good else FINDINGS
