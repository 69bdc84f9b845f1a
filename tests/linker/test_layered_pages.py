"""A layered page is a page of the store whose layers can be read and proven one by one."""

import os
import time

import numpy as np
import pytest
from linker_kit import GEOMETRY, Layered, fingerprint, flip, segment_files

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.outcome import Outcome, WriteOutcome
from sglang_hicache_ext.storage_backends.nvme.codes import READ_CODE
from sglang_hicache_ext.storage_backends.nvme.layered import LayeredGeometry, layer_keys, read_header


@pytest.fixture
def layered(tmp_path):
    made = Layered(tmp_path / "store")
    yield made
    made.store.close()


def soon():
    return time.monotonic() + 20


def load(layered, read, layer):
    array, regions = layered.place(len(read.keys), layer)
    result = read.read_layer(layer, np.arange(len(read.keys)), regions, soon())
    return array, result


def test_every_run_and_layer_starts_at_a_block():
    for runs in (((4096,),), ((8192, 4096),) * 80, ((4096, 4096),) * 130):
        geometry = LayeredGeometry(runs)
        assert geometry.header_bytes % 4096 == 0
        assert all(geometry.offset(layer) % 4096 == 0 for layer in range(geometry.layers + 1))
        assert geometry.page_bytes == geometry.header_bytes + sum(map(sum, runs))


def test_runs_that_do_not_fill_blocks_are_refused_with_what_to_change():
    with pytest.raises(ConfigError) as raised:
        LayeredGeometry(((4096, 2048),))
    assert "2048" in str(raised.value) and "--page-size" in str(raised.value)


def test_layers_come_back_as_they_were_written_in_any_order(layered):
    assert set(layered.write()) == {WriteOutcome.STORED}
    read = layered.pages.open(layered.ns, layered.keys, soon())
    for layer in (2, 0, 1):
        array, result = load(layered, read, layer)
        assert result.is_loaded
        assert (array == layered.content(layer)).all()
    assert set(read.count()) == {Outcome.LOADED}


def test_a_page_is_one_entry_of_the_index_and_an_ordinary_page_to_the_store(layered):
    layered.write()
    assert layered.store.stats().pages == len(layered.keys)
    assert set(layered.store.verify(layered.ns, layered.keys, GEOMETRY.page_bytes)) == {Outcome.LOADED}


def test_a_page_that_is_not_there_is_named_before_a_byte_is_read(layered):
    layered.write()
    other = os.urandom(32)
    read = layered.pages.open(layered.ns, [layered.keys[0], other], soon())
    assert not read.is_loaded
    assert read.count() == (Outcome.LOADED, Outcome.ABSENT)


@pytest.mark.parametrize("layer", range(3))
def test_a_flipped_byte_fails_its_own_layer_only_and_removes_the_page(layered, tmp_path, layer):
    layered.write()
    assert flip(tmp_path / "store", layered.content(layer)[5].tobytes()[:64], at=7)
    read = layered.pages.open(layered.ns, layered.keys, soon())
    assert read.is_loaded
    for each in range(3):
        array, result = load(layered, read, each)
        wrong = np.flatnonzero(result.codes != READ_CODE[Outcome.LOADED]).tolist()
        assert wrong == ([5] if each == layer else [])
        good = [i for i in range(12) if i not in wrong]
        assert (array[good] == layered.content(each)[good]).all()
        read.fail(np.arange(12), result.codes)
    assert read.count()[5] is Outcome.CORRUPT
    assert not layered.store.contains(layered.ns, layered.keys)[5]


def test_a_flipped_header_is_corrupt_before_any_layer_is_read(layered, tmp_path):
    layered.write()
    assert flip(tmp_path / "store", layered.memory[3, : GEOMETRY.header_bytes].tobytes()[:200], at=150)
    read = layered.pages.open(layered.ns, layered.keys, soon())
    assert read.count()[3] is Outcome.CORRUPT
    assert not layered.store.contains(layered.ns, layered.keys)[3]


def test_layers_of_one_page_cannot_stand_in_for_one_another(layered, tmp_path):
    """Equal bytes in two layers have different digests: a read at a wrong offset is caught."""
    layered.memory[:, GEOMETRY.offset(1) : GEOMETRY.offset(2)] = layered.content(0)
    layered.write()
    raw = layered.memory[0, : GEOMETRY.header_bytes].tobytes()
    layers = read_header(layered.ns.id, layered.keys[0], raw, GEOMETRY)
    assert layers["digest"][0] != layers["digest"][1]


def test_a_header_proves_itself_for_its_own_namespace_and_key_only(layered):
    layered.write()
    raw = layered.memory[0, : GEOMETRY.header_bytes].tobytes()
    assert read_header(layered.ns.id, layered.keys[0], raw, GEOMETRY) is not None
    assert read_header(layered.ns.id, layered.keys[1], raw, GEOMETRY) is None
    assert read_header(b"x" * 16, layered.keys[0], raw, GEOMETRY) is None
    assert read_header(layered.ns.id, layered.keys[0], raw, LayeredGeometry(((8192, 4096),) * 4)) is None


def test_a_truncated_file_is_a_corrupt_page_not_an_exception(layered, tmp_path):
    layered.write()
    for file in segment_files(tmp_path / "store"):
        os.truncate(file, 4096)
    read = layered.pages.open(layered.ns, layered.keys, soon())
    assert set(read.count()) == {Outcome.CORRUPT}


def test_pages_that_moved_during_a_load_are_found_where_they_are_now(layered):
    layered.write()
    read = layered.pages.open(layered.ns, layered.keys, soon())
    layered.store.clear(layered.ns)
    assert set(layered.write()) == {WriteOutcome.STORED}  # same bytes, another place
    read._entries["block"] += 1  # what a reused segment looks like: other bytes at the old place
    array, result = load(layered, read, 1)
    assert result.is_loaded and (array == layered.content(1)).all()


def test_a_page_written_anew_with_other_bytes_is_never_mixed_with_the_old_one(layered):
    layered.write()
    read = layered.pages.open(layered.ns, layered.keys, soon())
    assert load(layered, read, 0)[1].is_loaded
    layered.store.clear(layered.ns)
    layered.memory[:, GEOMETRY.header_bytes :] ^= 0x55
    layered.write()
    read._entries["block"] += 1
    result = load(layered, read, 1)[1]
    assert set(result.codes.tolist()) == {READ_CODE[Outcome.EVICTED]}
    assert layered.store.contains(layered.ns, layered.keys).all()  # the new pages are good and stay


def test_the_host_layout_and_the_linkers_do_not_share_pages(layered):
    layered.write()
    host = layered.store.namespace(fingerprint(epoch="").__class__(model="m", layout="page_first"))
    assert not layered.store.contains(host, layered.keys).any()


def test_layer_keys_differ_by_layer_and_by_page():
    keys = [bytes([i]) * 32 for i in range(4)]
    made = [key for layer in range(100) for key in layer_keys(keys, layer)]
    assert len(set(made) | set(keys)) == 404
    assert layer_keys([], 3) == []
