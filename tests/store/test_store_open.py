"""Opening: bad input is refused with what, where and what to write; limits, permissions, forks and re-attach."""

from __future__ import annotations

import json
import os
import resource
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError, StoreError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.nvme import layout
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.crash import KillHarness, disk_bytes
from sglang_hicache_ext.testing.stamps import HostArena, page_keys

Opener = Callable[..., NvmeStore]


def _file_instead(path: Path) -> dict[str, Any]:
    path.write_text("I am a file")
    return {}


def _other_product(path: Path) -> dict[str, Any]:
    path.mkdir()
    (path / "CURRENT").write_text("MANIFEST-000001")
    return {}


def _foreign_json(path: Path) -> dict[str, Any]:
    path.mkdir()
    (path / "store.json").write_text('{"product": "something else"}')
    return {}


def _newer_version(path: Path) -> dict[str, Any]:
    path.mkdir()
    (path / "store.json").write_text(json.dumps({"product": layout.PRODUCT, "format": 99}))
    return {}


def _hostile_numbers(path: Path) -> dict[str, Any]:
    path.mkdir()
    head = {"product": layout.PRODUCT, "format": 1, "store_id": "00" * 16, "segment_bytes": -4096, "map_bytes": 1}
    (path / "store.json").write_text(json.dumps({**head, "directories": 1 << 60}))
    return {}


def _world_writable(path: Path) -> dict[str, Any]:
    path.mkdir()
    path.chmod(0o777)
    return {}


def _dangling_link(path: Path) -> dict[str, Any]:
    path.symlink_to(path.with_name("nowhere") / "deeper")
    return {}


BAD: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "a file": (_file_instead, "not a directory"),
    "another product's directory": (_other_product, "holds something else"),
    "another product's store.json": (_foreign_json, "not one of ours"),
    "a newer format": (_newer_version, "format 99"),
    "a hostile store.json": (_hostile_numbers, "damaged"),
    "a world-writable directory": (_world_writable, "writable by everyone"),
    "a dangling symlink": (_dangling_link, "cannot use directory|not a directory"),
    "a capacity larger than the disk": (lambda p: {"capacity": "900TiB"}, "larger than the file system"),
    "a capacity too small": (lambda p: {"capacity": "5MiB"}, "too small"),
    "a segment that is no multiple of 4 KiB": (lambda p: {"segment": 1_000_001}, "segment is"),
    "a tiny segment": (lambda p: {"segment": 4096}, "segment is"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_message(nvme: Opener, tmp_path: Path, case: str) -> None:
    prepare, told = BAD[case]
    keys = prepare(tmp_path / "store")
    with pytest.raises(ConfigError, match=told) as caught:
        nvme(**keys)
    assert caught.value.where and caught.value.todo, "the message must say where and what to do"


def test_a_directory_of_somebody_else_is_refused(nvme: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    monkeypatch.setattr(layout.os, "geteuid", lambda: 4242)
    for name in ("store", "link"):
        with pytest.raises(ConfigError, match="belongs to user"):
            nvme(name)


def test_a_store_without_path_is_refused() -> None:
    from sglang_hicache_ext.config import HiCacheExtConfig

    with pytest.raises(ConfigError, match="needs a path"):
        NvmeStore(HiCacheExtConfig())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_refused(nvme: Opener, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="read-only"):
        nvme()


def test_a_read_only_directory_is_refused_also_for_root(
    nvme: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    monkeypatch.setattr(layout.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="read-only"):
        nvme()


def test_other_directories_or_another_order_are_refused(nvme: Opener, tmp_path: Path) -> None:
    paths = [str(tmp_path / n) for n in ("a", "b")]
    nvme(path=paths, capacity="64MiB").close()
    with pytest.raises(ConfigError, match=r"another store|directories"):
        nvme(path=paths[::-1], capacity="64MiB")
    with pytest.raises(ConfigError, match="2 directories"):
        nvme(path=paths[:1], capacity="64MiB")
    with pytest.raises(ConfigError, match="the store was made with"):
        nvme(path=paths, capacity="64MiB", segment="2MiB")


def test_processes_must_agree_on_the_capacity(nvme: Opener) -> None:
    nvme(capacity="32MiB")
    with pytest.raises(ConfigError, match="another capacity"):
        nvme(capacity="64MiB")


def test_directories_are_0700_and_files_0600(nvme: Opener, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = nvme()
        ns, keys = store.namespace(Fingerprint("m")), page_keys(4)
        store.write(ns, keys, HostArena(4, (8192,)).fill(ns.id, keys))
        store.close()
    finally:
        os.umask(old)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"


def test_no_pickle_anywhere() -> None:
    root = Path(layout.__file__).parents[1]
    guilty = [p for p in root.rglob("*.py") if any(w in p.read_text() for w in ("import pickle", "import marshal"))]
    assert not guilty


def test_a_store_that_was_closed_has_its_pages(nvme: Opener) -> None:
    store = nvme()
    ns, keys, arena = store.namespace(Fingerprint("m")), page_keys(50), HostArena(50, (8192, 8192))
    store.write(ns, keys, arena.fill(ns.id, keys))
    store.close()
    again = nvme()
    assert again.metrics.snapshot().counters.get("index_rebuilds", 0) == 0
    assert again.contains(ns, keys).all()
    assert set(again.write(ns, keys, arena.fill(ns.id, keys)).outcomes) == {WriteOutcome.PRESENT}
    assert again.metrics.snapshot().counters["written_bytes"] == 0
    assert [n.fingerprint for n in again.namespaces()] == [Fingerprint("m")]
    assert sorted(again.iter_pages(ns)) == sorted((k, 16384) for k in keys)
    assert set(again.verify(ns, keys, 16384)) == {Outcome.LOADED}


def test_a_smaller_capacity_gives_bytes_back_and_a_larger_one_takes_them(nvme: Opener, tmp_path: Path) -> None:
    def fill(store: NvmeStore, first: int) -> None:
        ns, arena = store.namespace(Fingerprint("m")), HostArena(16, (65536,))
        for start in range(first, first + 640, 16):
            keys = page_keys(16, start=start)
            assert set(store.write(ns, keys, arena.fill(ns.id, keys)).outcomes) == {WriteOutcome.STORED}

    for capacity in (48, 24, 40):
        store = nvme(capacity=f"{capacity}MiB")
        assert disk_bytes(str(tmp_path / "store")) <= capacity << 20
        fill(store, capacity * 1000)
        assert disk_bytes(str(tmp_path / "store")) <= capacity << 20
        harness = KillHarness({"path": str(tmp_path / "store")})
        assert harness.accounting_errors(store) == []
        store.close()


@pytest.mark.parametrize(
    ("capacity", "segment"), [("24MiB", "1MiB"), ("77MiB", "64KiB"), ("1GiB", "16MiB"), ("3GiB", "64MiB")]
)
def test_the_capacity_holds_everything_a_store_may_grow_to(
    nvme: Opener, tmp_path: Path, capacity: str, segment: str
) -> None:
    made = nvme(capacity=capacity, segment=segment).layout
    files = made.segment_bytes + layout.extent_map_bytes(made.segment_bytes)
    most = made.max_segments * files + made.heat_bytes + made.map_bytes + layout.SMALL_FILES_BYTES
    allowed = HiCacheExtConfig.parse({"path": "/x", "capacity": capacity}).capacity
    assert most <= allowed
    found = layout.existing_capacity(tmp_path / "store")  # what a tool that has no config goes by
    assert most <= found <= allowed
    assert nvme(capacity=found, segment=segment).layout.max_segments == made.max_segments


def test_two_stores_in_one_process_share_one_index(nvme: Opener) -> None:
    one, two = nvme(), nvme()
    ns, keys, arena = one.namespace(Fingerprint("m")), page_keys(8), HostArena(8, (8192,))
    one.write(ns, keys, arena.fill(ns.id, keys))
    assert two.contains(ns, keys).all()
    one.close()
    arena.poison()
    assert set(two.read(ns, keys, arena.regions).outcomes) == {Outcome.LOADED}
    two.close()
    assert nvme().contains(ns, keys).all()


def test_a_store_carried_through_a_fork_refuses_to_touch_the_index(nvme: Opener) -> None:
    store = nvme()
    ns = store.namespace(Fingerprint("m"))
    index = store._index
    index._ident = (index._ident[0] + 1, *index._ident[1:])  # as the child of a fork would see it
    with pytest.raises(StoreError, match="fork"):
        store.contains(ns, page_keys(1))
    index._ident = (os.getpid(), *index._ident[1:])
    assert not store.contains(ns, page_keys(1)).any()


@pytest.mark.slow
def test_attach_and_detach_a_hundred_times_leaks_nothing(nvme: Opener, tmp_path: Path) -> None:
    def cycle() -> None:
        store = nvme()
        ns, keys, arena = store.namespace(Fingerprint("m")), page_keys(4), HostArena(4, (8192,))
        store.write(ns, keys, arena.fill(ns.id, keys))
        assert set(store.read(ns, keys, arena.regions).outcomes) == {Outcome.LOADED}
        store.close()

    for _ in range(5):
        cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count(), disk_bytes(str(tmp_path / "store"))
    for _ in range(100):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before[:2]
    assert disk_bytes(str(tmp_path / "store")) == before[2]


def test_sixty_four_open_files_are_enough(nvme: Opener) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, in_use + 40), hard))
    try:
        store = nvme(capacity="64MiB", segment="256KiB")
        ns, arena = store.namespace(Fingerprint("m")), HostArena(16, (65536,))
        keys = page_keys(480)
        for start in range(0, 480, 16):
            part = keys[start : start + 16]
            assert set(store.write(ns, part, arena.fill(ns.id, part)).outcomes) == {WriteOutcome.STORED}
        assert len(store._files.table.snapshot()) > 100
        every = keys[::7]
        arena = HostArena(len(every), (65536,))
        outcomes = store.read(ns, every, arena.regions).outcomes
        assert set(outcomes) == {Outcome.LOADED}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
