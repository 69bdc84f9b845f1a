"""Config: unknown keys, sizes, no coercion, each refused in one message that says what to write."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sglang_hicache_ext.config import SGLANG_KEYS, HiCacheExtConfig, parse_size
from sglang_hicache_ext.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GiB", 64 << 30),
        ("500MB", 500_000_000),
        ("1.5MiB", 3 << 19),
        ("12", 12),
        (7, 7),
        ("2 TiB", 2 << 40),
        ("0", 0),
    ],
)
def test_sizes_are_bytes_or_text_with_a_unit(text: Any, expected: int) -> None:
    assert parse_size(text, "capacity") == expected


@pytest.mark.parametrize("bad", ["", "GiB", "-1", -1, 1.5, True, None, "64 XiB", [1], "1e9"])
def test_a_bad_size_names_the_key_and_what_to_write(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"capacity.*->.*64GiB"):
        parse_size(bad, "capacity")


def test_the_line_from_the_readme_is_accepted() -> None:
    raw = {"path": "/mnt/nvme0/kv", "capacity": "2TiB", "engine": "auto", "prefetch_threshold": 256}
    config = HiCacheExtConfig.parse(raw)
    assert config.path == ("/mnt/nvme0/kv",)
    assert config.capacity == 2 << 40
    assert config.sglang == {"prefetch_threshold": 256}


def test_an_unknown_key_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'capacty'.*did you mean 'capacity'"):
        HiCacheExtConfig.parse({"capacty": "1GiB"})
    with pytest.raises(ConfigError, match=r"did you mean 'prefetch_threshold'"):
        HiCacheExtConfig.parse({"prefetch_treshold": 1})


def test_an_unknown_key_without_neighbour_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known keys: .*capacity"):
        HiCacheExtConfig.parse({"zzzzqqqq": 1})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"engine": "uring"}, "'io_uring'"),
        ({"durability": True}, "'process', 'device'"),
        ({"io_depth": "32"}, "write a int"),
        ({"io_depth": 0}, "from 1 to"),
        ({"io_depth": True}, "io_depth is True"),
        ({"read_deadline_s": -1}, "from 0.001"),
        ({"reinsert": "true"}, "write a bool"),
        ({"reinsert": 1}, "write a bool"),
        ({"namespace": 7}, "write a text"),
        ({"path": ""}, "a directory"),
        ({"path": []}, "a directory"),
        ({"path": ["/a", "/a"]}, "twice"),
        ({"path": 3}, "a directory"),
        ({"prefetch_policy": "bestest"}, "'deadline'"),
        ({"pipeline": "on"}, "'extension'"),
    ],
)
def test_a_bad_value_is_refused_not_coerced(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HiCacheExtConfig.parse(raw)
    assert next(iter(raw)) in str(caught.value)
    assert message in str(caught.value)


def test_sglang_keys_pass_through_untouched() -> None:
    raw = dict.fromkeys(SGLANG_KEYS, 1)
    assert HiCacheExtConfig.parse(raw).sglang == raw


def test_the_tree_is_frozen_and_every_option_documents_itself() -> None:
    config = HiCacheExtConfig.parse({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.capacity = 1  # type: ignore[misc]
    for f in dataclasses.fields(HiCacheExtConfig):
        assert f.metadata["doc"].endswith("."), f.name


def test_two_configs_do_not_share_a_default_mapping() -> None:
    assert HiCacheExtConfig().sglang is not HiCacheExtConfig.parse({}).sglang
