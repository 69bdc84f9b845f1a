"""The probe: a real page decides which engine serves a directory."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from sglang_hicache_ext.errors import CapabilityError
from sglang_hicache_ext.storage_backends.engines import open_engine
from sglang_hicache_ext.storage_backends.engines.libc import dio_alignment
from sglang_hicache_ext.storage_backends.engines.posix import PosixEngine
from sglang_hicache_ext.storage_backends.engines.probe import AUTO_ORDER, NAMES, alignment, make_engine, probe_table
from sglang_hicache_ext.testing.engine_faults import Fault, FaultPlan, FaultyEngine


def faulty(fault: Fault, names=AUTO_ORDER):
    def opener(name, directory, depth, direct):
        engine = make_engine(name, directory, depth, direct)
        return FaultyEngine(engine, FaultPlan(read={fault: 1.0}, write={fault: 1.0})) if name in names else engine

    return opener


def test_the_table_has_a_row_for_every_engine_and_says_what_failed(tmp_path):
    table = {probe.engine: probe for probe in probe_table(str(tmp_path))}
    assert tuple(table) == NAMES
    assert table["posix"].ok and table["posix"].described["engine"] == "posix"
    assert all(probe.ok or probe.reason for probe in table.values())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.FLIP, Fault.ENOSPC])
def test_auto_goes_on_to_the_next_engine_when_the_page_does_not_come_back(tmp_path, fault):
    engine = open_engine("auto", str(tmp_path), opener=faulty(fault, AUTO_ORDER[:2]))
    assert engine.name == "aiofiles"
    engine.close()
    assert os.listdir(tmp_path) == []


def test_the_page_is_moved_in_a_file_without_a_name(tmp_path):
    """A process killed in the middle of the probe leaves nothing on the disk."""
    seen = []

    class Watching(PosixEngine):
        def write(self, *args, **options):
            seen.append(os.listdir(tmp_path))
            return super().write(*args, **options)

    open_engine("posix", str(tmp_path), opener=lambda *_: Watching()).close()
    assert seen == [[]]


def test_when_nothing_works_every_reason_is_told(tmp_path):
    with pytest.raises(CapabilityError) as raised:
        open_engine("auto", str(tmp_path), opener=faulty(Fault.EIO))
    assert all(name in str(raised.value) for name in AUTO_ORDER)
    assert os.strerror(errno.EIO) in str(raised.value)


def test_an_engine_that_was_asked_for_is_not_replaced(tmp_path):
    with pytest.raises(CapabilityError) as raised:
        open_engine("posix", str(tmp_path), opener=faulty(Fault.ENOSPC, ("posix",)))
    assert os.strerror(errno.ENOSPC) in str(raised.value) and "engine: auto" in str(raised.value)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(CapabilityError) as raised:
        open_engine("spdk", str(tmp_path))
    assert all(name in str(raised.value) for name in ("auto", *NAMES))


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(CapabilityError) as raised:
        open_engine("posix", str(tmp_path / "none"))
    assert str(tmp_path / "none") in str(raised.value)


def test_every_directory_is_tried(tmp_path):
    with pytest.raises(CapabilityError):
        open_engine("posix", [str(tmp_path), str(tmp_path / "none")])
    open_engine("posix", [str(tmp_path)]).close()


def test_a_directory_that_does_not_answer_costs_the_time_limit_only(tmp_path):
    let_go = threading.Event()
    closed = threading.Event()

    class Late(PosixEngine):
        def close(self) -> None:
            super().close()
            closed.set()

    def opener(name, directory, depth, direct):
        let_go.wait(60)
        return Late()

    with pytest.raises(CapabilityError) as raised:
        open_engine("posix", str(tmp_path), opener=opener, timeout_s=-0.9)
    assert "no answer" in str(raised.value)
    let_go.set()
    assert closed.wait(30)  # an engine that came too late is not leaked


def test_a_page_that_hangs_fails_the_probe(tmp_path):
    with pytest.raises(CapabilityError):
        open_engine("posix", str(tmp_path), opener=faulty(Fault.HANG, ("posix",)))


def test_kvikio_without_a_driver_names_what_to_install(tmp_path):
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(CapabilityError) as raised:
            open_engine("kvikio", str(tmp_path))
        assert "libcuda.so.1" in str(raised.value) and "gds-cu12" in str(raised.value)
    else:
        pytest.skip("this machine has a CUDA driver")


def test_a_file_system_without_direct_i_o_is_served_buffered(tmp_path, monkeypatch):
    def refuse(path, flags, *args, _open=os.open, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return _open(path, flags, *args, **kwargs)

    monkeypatch.setattr("sglang_hicache_ext.storage_backends.engines.files.os.open", refuse)
    engine = open_engine("auto", str(tmp_path))
    described = engine.describe()
    assert described["direct_requested"] and described["direct"] is False
    assert "O_DIRECT refused" in described["direct_reason"]
    engine.close()


def test_alignment_is_at_least_4096_in_the_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 8192)
    memory_align, file_align = alignment(str(path))
    assert file_align >= 4096 and memory_align in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    assert dio_alignment(str(tmp_path / "none")) is None
