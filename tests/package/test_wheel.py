"""The package as users get it: wheel and sdist, a bare environment without torch and SGLang, and beside an installed SGLang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
OTHER_VERSION = "0.1.0.post1"
"""Not the installed one, so that pip has something to do."""
RUNTIME = ("numpy", "numpy.libs", "lmdb", "xxhash")
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist) built from a copy, the wheel through the sdist."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("dist")
    leave_out = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "docs", "tests", "benchmarks"
    )
    shutil.copytree(ROOT, source, ignore=leave_out)
    project = source / "pyproject.toml"
    text = project.read_text()
    version = tomllib.loads(text)["project"]["version"]
    project.write_text(text.replace(f'version = "{version}"', f'version = "{OTHER_VERSION}"', 1))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_every_module_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    parts = {"sglang_hicache_ext": ROOT / "sglang_hicache_ext", "sglang_hicache_ext/storage_backends": ROOT / "storage_backends",
             "sglang_hicache_ext/kernels/l2_prefetch": ROOT / "kernels/l2_prefetch"}  # fmt: skip
    wanted = {
        f"{prefix}/{path.relative_to(folder)}"
        for prefix, folder in parts.items()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".json", ".typed") and "__pycache__" not in path.parts
    }
    code = {n for n in names if ".dist-info/" not in n}
    assert wanted - code == set(), "missing in the wheel"
    assert code - wanted == set(), "too much in the wheel"
    info = {n.split("/", 1)[1] for n in names if ".dist-info/" in n}
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= info


def test_the_sdist_can_be_built_and_read(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {n.split("/", 1)[-1] for n in archive.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "storage_backends/nvme/store.py",
        "kernels/l2_prefetch/kernel.py",
    } <= names


def test_it_works_in_a_bare_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Only the three libraries it names; a page goes to the drive and comes back, and nothing asks for torch or SGLang."""
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare/bin/python"
    (site,) = (tmp_path / "bare/lib").glob("python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, built[0])
    for name in RUNTIME:
        found = Path(metadata.distribution("numpy").locate_file(name))
        if found.exists():
            (site / name).symlink_to(found)
    code = (
        "import sys, numpy as np\n"
        "from sglang_hicache_ext.config import HiCacheExtConfig\n"
        "from sglang_hicache_ext.keys import Fingerprint\n"
        "from sglang_hicache_ext.page import regions_of_array\n"
        "from sglang_hicache_ext.storage_backends import open_store\n"
        "store = open_store(HiCacheExtConfig(path=(sys.argv[1],), capacity=64 << 20), 'nvme')\n"
        "ns, page = store.namespace(Fingerprint(model='m')), np.arange(8192, dtype=np.uint8).reshape(1, -1)\n"
        "store.write(ns, [bytes(32)], regions_of_array(page)); back = np.zeros_like(page)\n"
        "print(store.read(ns, [bytes(32)], regions_of_array(back)).outcomes[0], (back == page).all()); store.close()\n"
        "assert not {'torch', 'sglang', 'typer', 'rich'} & set(sys.modules)\n"
        "import importlib.util as u; assert u.find_spec('torch') is None and u.find_spec('sglang') is None\n"
        "from sglang_hicache_ext.sglang_adapter import compat; assert compat.installed_version('sglang') is None\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    assert run(python, "-W", "error", "-c", code, tmp_path / "kv", cwd=tmp_path, env=env).split() == ["loaded", "True"]
    command = subprocess.run(
        [str(python), "-m", "sglang_hicache_ext.cli.main"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert command.returncode == 1
    assert "pip install 'sglang-hicache-ext[cli]'" in command.stderr
    assert len(command.stderr.splitlines()) == 1


def test_beside_an_installed_sglang_pip_changes_no_other_package(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Without an index pip can only do it when everything it needs is there already; its plan names us alone."""
    pytest.importorskip("sglang")
    before = run(sys.executable, "-m", "pip", "freeze", "--all")
    report = tmp_path / "plan.json"
    run(sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--report", report, built[0])
    plan = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    assert plan == ["sglang-hicache-ext"]
    assert run(sys.executable, "-m", "pip", "freeze", "--all") == before
