"""Engines and servers run in processes of their own; this one needs the kit that starts them."""

import sys
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parent.parent / "sglang_cpu"
if str(KIT) not in sys.path:
    sys.path.append(str(KIT))

IN_CI = (
    "test_a_cold_engine_takes_every_prefix_from_storage[tiny-2-layer_first-dynamic]",
    "test_a_cold_engine_takes_every_prefix_from_storage[swa-1-page_first-nvme]",
    "test_weights_updated_from_disk_never_meet_old_pages_and_are_found_after_a_restart",
    "test_prefixes_come_through_the_linker_and_damage_never_changes_a_token",
    "test_every_policy_loads_what_sglang_loads_with_the_same_bytes[mha-page_first_direct]",
    "test_two_ranks_agree_under_every_policy_and_over_a_store_that_fails_on_one",
    "test_without_the_option_nothing_of_sglang_is_touched",
    "test_a_fresh_node_takes_every_prefix_from_the_pool_with_the_same_tokens[tiered]",
    "test_the_pair_gives_the_tokens_of_one_server",
)
"""The choice that CI has time for: each part, layout family and tensor parallel size once. The rest is ``full``."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and item.name not in IN_CI:
            item.add_marker(pytest.mark.full)


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
