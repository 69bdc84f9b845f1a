"""Real SGLang in this process. Its own warnings are not ours to fix; ours stay errors."""

import os
import sys
import warnings
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parent.parent / "sglang_cpu"
for folder in (KIT, KIT / "site"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for module in ("torch", "sglang", "transformers", "importlib", "<frozen"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:::{module}"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:sglang"))


_status = []


def pytest_sessionfinish(session, exitstatus):
    _status.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Leave without finalisation: an extension that SGLang's fixtures import crashes the interpreter there."""
    if _status and "hybrid_kit" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[0])


@pytest.fixture(scope="session")
def kit():
    """The controller kit, started; skips where SGLang is not installed."""
    pytest.importorskip("sglang")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cpu_kit

        cpu_kit.install()
        import controller_kit
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_hicache_ext.sglang_adapter import hooks, plugin

        plugin.register()
        hooks.ensure_installed()
        HookRegistry.apply_hooks()
        controller_kit.start()
    return controller_kit


@pytest.fixture
def nvme(tmp_path):
    """Extra config of an NVMe store in a directory of its own."""
    return {"path": str(tmp_path / "store"), "capacity": "64MiB"}
