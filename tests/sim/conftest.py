"""``pytest tests/sim --sim-seed=N`` replays one seed of the simulation."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, default=None, help="play this seed of the pipeline simulation only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim_seeds" not in metafunc.fixturenames:
        return
    only = metafunc.config.getoption("--sim-seed", default=None)
    ranges = [range(only, only + 1)] if only is not None else [range(i, i + 50) for i in range(0, 2000, 50)]
    metafunc.parametrize("sim_seeds", ranges, ids=lambda r: f"seeds-{r.start}-{r.stop - 1}")
