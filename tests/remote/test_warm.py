"""Warming a fresh node from the far tier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_hicache_ext import warm
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.memory import MemoryStore
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.warm import Entry, Manifest


def memory(capacity: str = "64MiB") -> MemoryStore:
    return MemoryStore(HiCacheExtConfig.parse({"capacity": capacity}))


def filled(count: int, *stores: Any, model: str = "m", nbytes: int = 4096) -> tuple[Fingerprint, list[bytes], Any]:
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    keys = [rng.bytes(32) for _ in range(count)]
    for store in stores:
        store.write(store.namespace(Fingerprint(model)), keys, regions_of_array(data))
    return Fingerprint(model), keys, data


def test_a_fresh_node_gets_what_a_warm_one_published(tmp_path: Any) -> None:
    far, near, fresh = memory(), memory(), memory()
    fingerprint, keys, data = filled(40, near, far)
    assert warm.publish(far, warm.collect(near))
    manifest = warm.fetch(far)
    assert manifest is not None and {e.key for e in manifest.entries} == set(keys)
    report = warm.warm(fresh, far, manifest)
    assert (report.kept, report.looked_at, report.ended_because) == (40, 40, "done")
    target = np.zeros_like(data)
    ns = fresh.namespace(fingerprint)
    assert set(fresh.read(ns, keys, regions_of_array(target)).outcomes) == {Outcome.LOADED}
    assert (target == data).all()


def test_the_hottest_pages_come_first(tmp_path: Any) -> None:
    config = HiCacheExtConfig.parse({"path": str(tmp_path), "capacity": "32MiB", "segment": "1MiB", "engine": "posix"})
    near = NvmeStore(config)
    try:
        # A megabyte each: heat is kept per stretch of a segment, not per page.
        fingerprint, keys, data = filled(4, near, nbytes=512 << 10)
        ns = near.namespace(fingerprint)
        near.read(ns, keys[2:3], regions_of_array(np.zeros_like(data[:1])))
        manifest = warm.collect(near)
    finally:
        near.close()
    assert manifest.entries[0].key == keys[2] and len(manifest.entries) == 4


def test_warming_is_bounded_and_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "WAVE_BYTES", 8 * 4096)
    far, near, fresh = memory(), memory(), memory()
    filled(40, near, far)
    manifest = warm.collect(near)
    first = warm.warm(fresh, far, manifest, budget_bytes=20 * 4096)
    assert (first.kept, first.kept_bytes, first.ended_because) == (20, 20 * 4096, "budget")
    waves = iter([False, True])
    second = warm.warm(fresh, far, manifest, budget_bytes=1 << 30, should_stop=lambda: next(waves))
    assert second.ended_because == "stopped" and second.present == 8
    third = warm.warm(fresh, far, manifest, budget_bytes=1 << 30)
    assert (third.kept, third.present, third.ended_because) == (20, 20, "done")


def test_pages_that_are_gone_are_counted_and_the_counts_add_up() -> None:
    far, near, fresh = memory(), memory(), memory()
    fingerprint, keys, _ = filled(20, near, far)
    far.remove(far.namespace(fingerprint), keys[:5])
    report = warm.warm(fresh, far, warm.collect(near))
    assert (report.missing, report.kept) == (5, 15)
    assert report.present + report.kept + report.missing + report.failed + report.refused == report.looked_at == 20


def test_a_full_near_tier_ends_it() -> None:
    far, near, fresh = memory(), memory(), memory("4KiB")
    filled(40, near, far)
    fresh.write = lambda ns, keys, regions, deadline_s=None: type(  # type: ignore[method-assign,assignment]
        "Result", (), {"outcomes": (), "drain": None}
    )()
    report = warm.warm(fresh, far, warm.collect(near), budget_bytes=1 << 30)
    assert report.ended_because == "near tier is full" and report.kept == 0


def test_publishing_again_replaces_the_manifest_and_a_part_of_one_is_none() -> None:
    far, near = memory(), memory()
    _, keys, _ = filled(8_000, near, nbytes=8)
    assert warm.publish(far, warm.collect(near))
    big = warm.fetch(far)
    assert big is not None and len(big.entries) == 8_000
    ns = warm._manifest_space(far, "")
    far.remove(ns, [warm._part_key(1)])
    assert warm.fetch(far) is None
    near.remove(near.namespace(Fingerprint("m")), keys[10:])
    assert warm.publish(far, warm.collect(near))
    small = warm.fetch(far)
    assert small is not None and len(small.entries) == 10
    assert warm.fetch(far, "another deployment") is None


@pytest.mark.parametrize(
    "raw", [b"", b"\0\0\0\0", b"\5\0\0\0[1,2]", b"\2\0\0\0[]" + bytes(37), b"\2\0\0\0[]" + bytes(38)]
)
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a manifest|Expecting|Extra"):
        Manifest.decode(raw)


def test_a_manifest_survives_encoding() -> None:
    manifest = Manifest(
        (Fingerprint("a"), Fingerprint("b", extra={"x": "y"})), (Entry(1, 9, b"k" * 32), Entry(0, 8, b"l" * 32))
    )
    assert Manifest.decode(manifest.encode()) == manifest
