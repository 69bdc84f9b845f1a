"""Warming a fresh node: fill its near store from a far one, hottest pages first, bounded and resumable.

The far store's names are one-way, so it cannot say what it holds. A node that has served for a while does: it publishes a
manifest of its near store's pages, as pages of the far store, and a fresh node follows it. Following it again goes on where
it stopped, because pages that are there already are skipped.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_hicache_ext.keys import KEY_BYTES, Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.ports import Namespace, PageStore

WAVE_BYTES = 16 << 20
PART_BYTES = 256 << 10
MAX_ENTRIES = 1_000_000
_ENTRY = struct.Struct(f"<HI{KEY_BYTES}s")
_HEAD = struct.Struct("<8sQ32s")
_MAGIC = b"HXwarm\x00\x01"


@dataclass(frozen=True, slots=True)
class Entry:
    """One page: index into ``Manifest.fingerprints``, bytes, key."""

    space: int
    nbytes: int
    key: bytes


@dataclass(frozen=True)
class Manifest:
    """Pages worth having, the hottest first."""

    fingerprints: tuple[Fingerprint, ...]
    entries: tuple[Entry, ...]

    def encode(self) -> bytes:
        words = json.dumps([f.words() for f in self.fingerprints]).encode()
        body = b"".join(_ENTRY.pack(e.space, e.nbytes, e.key) for e in self.entries)
        return struct.pack("<I", len(words)) + words + body

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises ValueError when ``raw`` is no manifest."""
        try:
            (size,) = struct.unpack_from("<I", raw)
            fingerprints = tuple(Fingerprint.from_words(w) for w in json.loads(raw[4 : 4 + size]))
            entries = tuple(Entry(*e) for e in _ENTRY.iter_unpack(raw[4 + size :]))
        except (struct.error, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error}") from error
        if any(e.space >= len(fingerprints) for e in entries):
            raise ValueError("not a manifest: an entry names a fingerprint that is not there")
        return cls(fingerprints, entries)


def collect(near: Any, limit: int = MAX_ENTRIES) -> Manifest:
    """The pages of a store that can list them, those that were read first, then the youngest.

    Args:
        near: a PageStore with ``namespaces`` and ``iter_pages``, and ``survey`` where it knows heat (the NVMe store).
        limit: entries at most.
    """
    spaces: list[Namespace] = near.namespaces()
    found: list[tuple[bool, float, Entry]] = []
    for index, ns in enumerate(spaces[: 1 << 16]):
        for key, nbytes, was_read, age_s in _pages_of(near, ns):
            found.append((not was_read, age_s, Entry(index, nbytes, key)))
    found.sort(key=lambda f: f[:2])
    return Manifest(tuple(ns.fingerprint for ns in spaces), tuple(e for _, _, e in found[:limit]))


def _pages_of(near: Any, ns: Namespace) -> Iterator[tuple[bytes, int, bool, float]]:
    if hasattr(near, "survey"):
        number = near.number_of(ns.id)
        for page in near.survey().pages(number) if number is not None else ():
            yield page.key, page.nbytes, page.was_read, page.age_s
    else:
        for key, nbytes in near.iter_pages(ns):
            yield key, nbytes, False, 0.0


def _manifest_space(store: PageStore, label: str) -> Namespace:
    return store.namespace(Fingerprint(model="hicache-ext warm manifest", namespace=label))


def _part_key(part: int) -> bytes:
    return hashlib.sha256(f"hicache-ext warm manifest part {part}".encode()).digest()


def publish(far: PageStore, manifest: Manifest, label: str = "") -> bool:
    """Write ``manifest`` into ``far``, in place of an earlier one; False when not every part was taken."""
    body = manifest.encode()
    raw = _HEAD.pack(_MAGIC, len(body), hashlib.sha256(body).digest()) + body
    parts = -(-len(raw) // PART_BYTES)
    memory = np.zeros((parts, PART_BYTES), np.uint8)
    memory.reshape(-1)[: len(raw)] = np.frombuffer(raw, np.uint8)
    ns, keys = _manifest_space(far, label), [_part_key(i) for i in range(parts)]
    far.remove(ns, keys)
    return all(o.is_stored for o in far.write(ns, keys, regions_of_array(memory)).outcomes)


def fetch(far: PageStore, label: str = "") -> Manifest | None:
    """The published manifest; None when there is none, or only a part of one (it is just being replaced)."""
    ns = _manifest_space(far, label)
    first = _read_parts(far, ns, 0, 1)
    if first is None:
        return None
    magic, size, digest = _HEAD.unpack_from(first)
    parts = -(-(_HEAD.size + size) // PART_BYTES)
    if magic != _MAGIC or parts > MAX_ENTRIES:
        return None
    rest = _read_parts(far, ns, 1, parts) if parts > 1 else b""
    if rest is None:
        return None
    body = (first + rest)[_HEAD.size : _HEAD.size + size]
    return Manifest.decode(body) if hashlib.sha256(body).digest() == digest else None


def _read_parts(far: PageStore, ns: Namespace, start: int, stop: int) -> bytes | None:
    memory = np.zeros((stop - start, PART_BYTES), np.uint8)
    result = far.read(ns, [_part_key(i) for i in range(start, stop)], regions_of_array(memory))
    if result.drain is not None:
        result.drain.wait(10.0)
    return memory.tobytes() if all(o is Outcome.LOADED for o in result.outcomes) else None


@dataclass
class WarmReport:
    """What became of the manifest's pages; the five counts add up to ``looked_at``.

    Attributes:
        ended_because: "done", "budget", "near tier is full", "far tier is down" or "stopped".
    """

    total: int
    looked_at: int = 0
    kept: int = 0
    present: int = 0
    missing: int = 0
    failed: int = 0
    refused: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
    ended_because: str = "done"


def warm(
    near: PageStore, far: PageStore, manifest: Manifest, *, budget_bytes: int | None = None,
    on_progress: Callable[[WarmReport], None] = lambda report: None, should_stop: Callable[[], bool] = lambda: False,
) -> WarmReport:  # fmt: skip
    """Copy the manifest's pages from ``far`` to ``near`` until all are there or the budget is spent.

    Args:
        budget_bytes: bytes to write; None takes 80 % of the near store's free capacity.
        on_progress: called after each wave.
        should_stop: asked before each wave; the next call goes on where this one stopped.
    """
    if budget_bytes is None:
        stats = near.stats()
        budget_bytes = max(0, int(0.8 * (stats.capacity_bytes - stats.used_bytes)))
    spaces = [(near.namespace(f), far.namespace(f)) for f in manifest.fingerprints]
    report, started = WarmReport(len(manifest.entries)), time.monotonic()
    for wave in _waves(manifest.entries):
        if should_stop():
            report.ended_because = "stopped"
            break
        if report.kept_bytes + wave[0].nbytes > budget_bytes:
            report.ended_because = "budget"
            break
        fits = (budget_bytes - report.kept_bytes) // wave[0].nbytes
        problem = _one_wave(near, far, spaces[wave[0].space], wave[:fits], report)
        report.seconds = time.monotonic() - started
        on_progress(report)
        if problem:
            report.ended_because = problem
            break
    return report


def _waves(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Runs of one namespace and size, at most WAVE_BYTES each, in order."""
    wave: list[Entry] = []
    for entry in entries:
        is_same = not wave or (entry.space, entry.nbytes) == (wave[0].space, wave[0].nbytes)
        if wave and (not is_same or (len(wave) + 1) * entry.nbytes > WAVE_BYTES):
            yield wave
            wave = []
        wave.append(entry)
    if wave:
        yield wave


def _one_wave(
    near: PageStore, far: PageStore, ns: tuple[Namespace, Namespace], wave: list[Entry], report: WarmReport
) -> str:
    """Copy one wave; returns why the whole must end, "" to go on."""
    report.looked_at += len(wave)
    there = near.contains(ns[0], [e.key for e in wave])
    keys = [e.key for e, is_there in zip(wave, there.tolist(), strict=True) if not is_there]
    report.present += len(wave) - len(keys)
    if not keys:
        return ""
    memory = np.empty((len(keys), wave[0].nbytes), np.uint8)
    read = far.read(ns[1], keys, regions_of_array(memory))
    if read.drain is not None:
        read.drain.wait(10.0)
    rows = [i for i, o in enumerate(read.outcomes) if o is Outcome.LOADED]
    gone = sum(o in (Outcome.ABSENT, Outcome.EVICTED, Outcome.MISMATCH) for o in read.outcomes)
    report.missing += gone
    report.failed += len(keys) - len(rows) - gone
    wrote = near.write(ns[0], [keys[i] for i in rows], regions_of_array(memory).take(rows))
    if wrote.drain is not None:
        wrote.drain.wait(10.0)
    kept = sum(o.is_stored for o in wrote.outcomes)
    report.kept += kept
    report.kept_bytes += kept * wave[0].nbytes
    report.refused += len(rows) - kept
    if rows and not kept:
        return "near tier is full"
    return "far tier is down" if not rows and not gone else ""
