"""Engines and servers run in processes of their own; this one needs the kit that starts them."""

import sys
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parent.parent / "sglang_cpu"
if str(KIT) not in sys.path:
    sys.path.append(str(KIT))


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory):
    """kind -> directory of a random model, written once."""
    pytest.importorskip("sglang")
    import models

    root, made = tmp_path_factory.mktemp("models"), {}

    def get(kind, seed=0):
        if (kind, seed) not in made:
            made[kind, seed] = models.write_model(kind, str(root / f"{kind}-{seed}"), seed)
        return made[kind, seed]

    return get
