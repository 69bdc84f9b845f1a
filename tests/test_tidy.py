"""Rules of the repository that a tool can hold: who imports whom, sizes, names, and what must not be there."""

import ast
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sglang_hicache_ext", "storage_backends", "kernels", "benchmarks", "tests")
SHIPPED = ("sglang_hicache_ext", "storage_backends", "kernels")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
BANNED_WORDS_IN_NAMES = ("Manager", "Helper", "Utils", "Handler")
DRIVERS_OF_STORES = {"lmdb", "xxhash", "numpy", "kvikio", "aiofiles", "mooncake"}


@lru_cache
def sources(*folders):
    found = []
    for folder in folders:
        found += [p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts]
    return sorted(found)


@lru_cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path):
    """(module, is inside a function) of every absolute import."""
    inside = {
        id(n)
        for f in ast.walk(tree(path))
        if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
        for n in ast.walk(f)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, id(node) in inside


def tops(path):
    return {name.split(".")[0] for name, _ in imports(path)}


def relative(path):
    return str(path.relative_to(ROOT))


def is_core(path):
    parts = path.relative_to(ROOT).parts
    return parts[0] == "sglang_hicache_ext" and parts[1] not in ("sglang_adapter", "cli", "testing", "kernels")


def test_only_the_adapter_imports_sglang_and_the_core_imports_no_torch():
    for path in sources(*SHIPPED):
        name = relative(path)
        if not name.startswith("sglang_hicache_ext/sglang_adapter/"):
            assert "sglang" not in tops(path), name
            if not name.startswith("kernels/"):
                assert "torch" not in tops(path), name


def test_the_core_and_the_stores_import_nothing_above_them():
    for path in sources(*SHIPPED):
        core, store = is_core(path), relative(path).startswith("storage_backends/")
        for module, _ in imports(path):
            if core or store:
                assert not module.startswith(("sglang_hicache_ext.sglang_adapter", "sglang_hicache_ext.cli")), relative(
                    path
                )
                assert not module.startswith("sglang_hicache_ext.testing"), relative(path)
            if core:
                assert not module.startswith("sglang_hicache_ext.storage_backends"), relative(path)


def test_nothing_imports_the_outer_folders_by_their_bare_names():
    for path in sources(*PACKAGES):
        assert not {"storage_backends", "kernels"} & tops(path), relative(path)


def is_device_code(node):
    """A Triton kernel cannot be cut into functions at will."""
    return any("jit" in ast.unparse(d) for d in node.decorator_list)


def docstring_lines(node):
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.end_lineno - first.lineno + 1 if is_docstring else 0


def test_files_and_functions_stay_small():
    for path in sources(*SHIPPED):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines"
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_device_code(node):
                length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
                assert length <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name} has {length} lines"


def test_class_names_say_what_a_thing_is():
    for path in sources(*SHIPPED):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                assert not any(w in node.name for w in BANNED_WORDS_IN_NAMES), f"{relative(path)}: {node.name}"


def test_nothing_is_pickled_or_evaluated():
    banned_modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    for path in sources(*SHIPPED):
        assert not banned_modules & tops(path), relative(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{relative(path)}:{node.lineno}"


def test_no_path_of_a_machine_is_written_down():
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home)/\w+")
    for path in [*sources(*PACKAGES), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if path != Path(__file__):
            found = pattern.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{relative(path)}: {found.group()}"


@pytest.mark.parametrize(
    "module", ["sglang_hicache_ext", "sglang_hicache_ext.config", "sglang_hicache_ext.storage_backends"]
)
def test_importing_the_package_pulls_in_neither_torch_nor_sglang(module):
    code = f"import sys, {module}; assert not {{'torch', 'sglang'}} & set(sys.modules), 'pulled in'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_kernels_is_never_ours_from_the_root_of_the_repository():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import sys; sys.path.insert(0, '.'); import kernels; print(getattr(kernels, '__file__', None))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    if done.returncode == 0 and done.stdout.strip() != "None":  # PyPI's package is installed: it must be the one found
        assert not done.stdout.strip().startswith(str(ROOT / "kernels")), done.stdout


def test_pypis_kernels_wins_over_the_folder_of_the_same_name(tmp_path):
    """A regular package anywhere on the path beats our folder, which has no __init__.py, wherever that stands."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("ORIGIN = 'pypi'\n")
    code = "import kernels; assert kernels.ORIGIN == 'pypi'"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )


def test_the_plugin_entry_point_can_be_loaded():
    from importlib.metadata import entry_points

    (point,) = [p for p in entry_points(group="sglang.srt.plugins") if p.name == "hicache_ext"]
    assert callable(point.load())
