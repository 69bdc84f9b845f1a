"""The kvikio path over a stand-in for the CUDA driver: host memory stands in for device memory, in a child process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STUB = HERE.parent / "engines" / "libcuda_stub.c"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the stand-in driver"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A directory with a libcuda.so.1 for LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("driver")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(STUB)], check=True, timeout=60)
    return str(folder)


@pytest.mark.timeout(200)
def test_the_kvikio_path_keeps_its_promises(driver, tmp_path):
    """Loads, corruption, pages without sums, buffer lifetime, a hanging read, and refusal without GDS."""
    child = subprocess.run(
        [sys.executable, str(HERE / "kvikio_child.py"), str(tmp_path / "store")],
        env={**os.environ, "LD_LIBRARY_PATH": driver},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    done = [line.split()[1] for line in child.stdout.splitlines() if line.startswith("ok ")]
    assert done == ["loads", "corrupt", "no_sums", "lifetime", "hang", "refused"]
