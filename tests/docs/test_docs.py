"""Documentation that can be checked: generated pages are fresh, names exist, links lead somewhere, commands parse."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_hicache_ext.cli.main import app
from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.exporter import PREFIXES, series_names

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
_FENCE = re.compile(r"```(?:bash|sh|console)?\n(.*?)```", re.S)


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/make_docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_dashboard_and_the_docs_contain_only_names_that_the_code_exports() -> None:
    known = {name.removeprefix(PREFIXES[0]) for name in series_names()}
    dashboard = (ROOT / "docs/grafana/hicache-ext.json").read_text()
    texts = [dashboard, *(p.read_text() for p in PAGES)]
    used = set(re.findall(r"\bhicache_ext_[a-z_]+", "\n".join(texts)))
    no_series = {"hicache_ext_pd"}  # a key of /server_info
    assert used <= known | {"hicache_ext_batch_seconds"} | no_series, used - known
    for panel in json.loads(dashboard)["panels"]:
        assert "datasource" not in panel
        for target in panel["targets"]:
            assert "sglang[:_]hicache_ext_" in target["expr"]


def test_every_exported_gauge_and_counter_has_a_panel() -> None:
    dashboard = (ROOT / "docs/grafana/hicache-ext.json").read_text()
    families = {n.removeprefix(PREFIXES[0]) for n in series_names() if not n.endswith(("_sum", "_count"))}
    assert {f for f in families if f not in dashboard} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def _commands(program: str) -> list[tuple[str, list[str]]]:
    out = []
    for page in PAGES:
        for block in _FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                text = line.strip().removeprefix("$ ")
                if text.startswith(program):
                    out.append((page.name, shlex.split(text.split("  #")[0])))
    return out


def test_every_hicache_ext_command_in_the_docs_parses() -> None:
    found = _commands("hicache-ext ")
    assert found
    for page, words in found:
        verb = words[1]
        shown = CliRunner().invoke(app, [verb, "--help"]).stdout
        for flag in [w.split("=")[0] for w in words if w.startswith("--")]:
            assert flag in shown, f"{page}: {' '.join(words)} has {flag}, which {verb} does not know"


def test_every_extra_config_in_the_docs_is_accepted() -> None:
    texts = {p.name: p.read_text() for p in PAGES}
    found = [(n, m) for n, t in texts.items() for m in re.findall(r"extra-config\s+(?:\\\s+)?'(\{.*?\})'", t, re.S)]
    assert found
    for name, raw in found:
        HiCacheExtConfig.parse(json.loads(raw), name)


def test_make_targets_named_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page, words in _commands("make "):
        named = [w for w in words[1:] if re.fullmatch(r"[a-z-]+", w)]
        assert set(named) <= targets, f"{page}: {' '.join(words)}"
