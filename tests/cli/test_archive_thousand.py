"""A thousand pages to an archive, to another directory, and back: byte-exact; each damaged page is refused, and only those."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from sglang_hicache_ext.cli.main import app
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.stamps import page_keys, stamp

PAGES, PAGE_BYTES = 1000, 16_384
PRINT = Fingerprint(model="thousand", page_tokens=16)
KEYS = page_keys(PAGES)

pytestmark = pytest.mark.slow


def open_store(path: Path) -> NvmeStore:
    return NvmeStore(HiCacheExtConfig(path=(str(path),), capacity=256 << 20, engine="posix"))


@pytest.fixture(scope="module")
def payload() -> NDArray[np.uint8]:
    return np.stack([stamp(PRINT.namespace_id, key, PAGE_BYTES) for key in KEYS])


@pytest.fixture
def archive(tmp_path: Path, payload: NDArray[np.uint8]) -> Path:
    store = open_store(tmp_path / "first")
    result = store.write(store.namespace(PRINT), KEYS, regions_of_array(payload))
    assert all(o.is_stored for o in result.outcomes)
    store.close()
    command("export", tmp_path / "a.hx", tmp_path / "first")
    return tmp_path / "a.hx"


def command(*args: object, code: int = 0) -> None:
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == code, done.output


def read_back(path: Path) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    store, memory = open_store(path), np.zeros((PAGES, PAGE_BYTES), np.uint8)
    outcomes = store.read(store.namespace(PRINT), KEYS, regions_of_array(memory)).outcomes
    store.close()
    return np.asarray([o is Outcome.LOADED for o in outcomes]), memory


def test_a_thousand_pages_to_another_directory_and_back(
    archive: Path, tmp_path: Path, payload: NDArray[np.uint8]
) -> None:
    for name in ("second", "third"):
        open_store(tmp_path / name).close()
    command("import", archive, tmp_path / "second")
    command("export", tmp_path / "b.hx", tmp_path / "second")
    command("import", tmp_path / "b.hx", tmp_path / "third")
    loaded, memory = read_back(tmp_path / "third")
    assert loaded.all()
    assert (memory == payload).all()


def test_each_damaged_page_is_refused_and_only_those(archive: Path, tmp_path: Path, payload: NDArray[np.uint8]) -> None:
    """A flipped byte in every tenth payload, at a random place."""
    raw, dice = bytearray(archive.read_bytes()), random.Random(4)
    damaged = set(range(0, PAGES, 10))
    for number in damaged:
        at = raw.find(payload[number].tobytes())
        assert at > 0
        raw[at + dice.randrange(PAGE_BYTES)] ^= 1 << dice.randrange(8)
    archive.write_bytes(raw)
    open_store(tmp_path / "second").close()
    command("import", archive, tmp_path / "second", code=1)
    loaded, memory = read_back(tmp_path / "second")
    assert set(np.flatnonzero(~loaded).tolist()) == damaged
    assert (memory[loaded] == payload[loaded]).all()
