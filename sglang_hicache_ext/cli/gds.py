"""What `doctor --gds` looks at: is GPUDirect Storage there, and does a real page take that way."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_hicache_ext.cli.probes import Finding, Severity

CHILD = (sys.executable, "-m", "sglang_hicache_ext.cli.gds_child")
STAGES_LIMIT_S = 45.0


def gds(
    directory: str = "", udev: Path = Path("/run/udev"), nvfs: Path = Path("/proc/driver/nvidia-fs")
) -> Iterator[Finding]:
    """GPUDirect Storage, stage by stage; the first that is missing decides.

    With a CUDA device each stage is then tried with a real page in ``directory`` (a temporary one when empty).
    """
    if importlib.util.find_spec("kvikio") is None:
        yield Finding(
            "gds", Severity.INFO, "kvikio is not installed: no GDS path", "pip install 'sglang-hicache-ext[gds-cu12]'"
        )
        return
    if not os.access(udev, os.R_OK):
        yield Finding(
            "gds",
            Severity.WARN,
            f"{udev} is not readable: kvikio falls back to POSIX",
            f"mount {udev} read-only into the container",
        )
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield Finding("gds", Severity.INFO, "no CUDA driver (libcuda.so.1): no GDS path, reads go to host memory")
        return
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        yield Finding("gds", Severity.INFO, "no CUDA device: no GDS path, reads go to host memory")
        return
    stats = nvfs / "stats"
    if stats.exists():
        yield Finding("gds", Severity.OK, "nvidia-fs is loaded", proof={"stats": stats.read_text()[:400]})
    else:
        yield Finding(
            "gds",
            Severity.INFO,
            "nvidia-fs is not loaded: kvikio reads through a bounce buffer, unless P2PDMA is in use",
        )
    yield from try_stages(directory or tempfile.gettempdir())


def try_stages(directory: str, command: Sequence[str] = CHILD, limit_s: float = STAGES_LIMIT_S) -> Iterator[Finding]:
    """Run the stages in a process of their own and report each; one that hangs is ended and named."""
    child = subprocess.Popen([*command, directory], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    watchdog = threading.Timer(limit_s, child.kill)
    watchdog.start()
    last = "the start"
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith("{"):  # libraries print too
                continue
            stage = json.loads(line)
            last = stage["stage"]
            yield _finding(stage)
        child.wait()
    finally:
        watchdog.cancel()
        child.kill()
        child.communicate()
    if child.returncode < 0:
        what = f"no answer within {limit_s:g} s after stage {last}"
        yield Finding("gds", Severity.FAIL, what, "check the NVIDIA driver; the linker must not use this path")


def _finding(stage: dict[str, Any]) -> Finding:
    name, what = str(stage["stage"]), str(stage["what"])
    if not stage["ok"]:
        todo = "the linker uses its own pinned ring instead (linker_path: auto)"
        return Finding("gds", Severity.WARN, f"{name} failed: {what}", todo, stage)
    if name == "verdict" and not what.startswith("gds"):
        todo = "linker_path: auto takes the pinned ring, which is the faster way then"
        return Finding("gds", Severity.INFO, f"path in use is {what}", todo, stage)
    return Finding(
        "gds", Severity.OK, f"path in use is {what}" if name == "verdict" else f"{name}: {what}", proof=stage
    )
