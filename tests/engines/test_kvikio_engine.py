"""The kvikio engine over a stand-in for the CUDA driver, in a child process: a driver that hangs must not hang the tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hicache_ext.errors import CapabilityError

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the stand-in driver"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a libcuda.so.1 for LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("driver")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(HERE / "libcuda_stub.c")], check=True, timeout=60)
    return str(folder)


def test_kvikio_passes_the_conformance_suite(driver):
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_engine_conformance.py")],
        env={**os.environ, "LD_LIBRARY_PATH": driver, "HICACHE_EXT_TEST_KVIKIO": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-4000:]
    assert " passed" in child.stdout and "skipped" not in child.stdout, child.stdout[-400:]


def test_auto_never_takes_kvikio_and_the_probe_shows_it_as_working(driver, tmp_path):
    code = (
        "import sys\n"
        "from sglang_hicache_ext.storage_backends.engines.probe import open_engine, probe_table\n"
        "print({p.engine: p.ok for p in probe_table(sys.argv[1])}['kvikio'])\n"
        "print(open_engine('auto', sys.argv[1]).name)\n"
        "print(open_engine('kvikio', sys.argv[1]).describe()['path'])\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "LD_LIBRARY_PATH": driver},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    shown, auto, path = child.stdout.split()
    assert shown == "True" and auto != "kvikio" and path == "posix"


def test_a_driver_that_makes_kvikio_hang_is_refused_within_the_limit(tmp_path, monkeypatch):
    from sglang_hicache_ext.storage_backends.engines import kvikio_engine

    monkeypatch.setattr(kvikio_engine, "_CHILD", "import threading; threading.Event().wait()")
    monkeypatch.setattr(kvikio_engine.ctypes, "CDLL", lambda name: None)
    with pytest.raises(CapabilityError) as raised:
        kvikio_engine.try_kvikio(str(tmp_path), 0.3)
    assert "hung" in str(raised.value)
