"""Keys and fingerprint: golden vectors, and every field of the fingerprint separates namespaces."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest

from sglang_hicache_ext.keys import KEY_BYTES, NAMESPACE_BYTES, Fingerprint, hash_chain, key_bytes

BASE = Fingerprint(
    model="m", dtype="torch.bfloat16", page_tokens=64, layout="page_first", layer_end=32, heads=8, k_dim=128, v_dim=128
)


def test_the_chain_is_sglangs_formula() -> None:
    tokens = [1, 2, 3, 4, 5]
    first = hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in (1, 2))).digest()
    second = hashlib.sha256(first + b"".join(t.to_bytes(4, "little") for t in (3, 4))).digest()
    assert hash_chain(tokens, 2) == [first.hex(), second.hex()]


def test_the_chain_has_a_golden_vector() -> None:
    assert hash_chain(range(1, 17), 16) == ["77d735ce838418aa151bd96b5b1e78ee63860892e0a95c00fe34178442be9b07"]
    got = hash_chain(range(4), 2)
    assert got == hash_chain([0, 1], 2) + hash_chain([2, 3], 2, got[0])


@pytest.mark.parametrize("n", [0, 1, 15])
def test_a_partial_page_has_no_hash(n: int) -> None:
    assert hash_chain(list(range(n)), 16) == []


def test_a_hex_hash_is_its_own_key_and_anything_else_is_hashed() -> None:
    digest = hashlib.sha256(b"x").digest()
    assert key_bytes(digest.hex()) == digest
    for odd in ("", "plain", "z" * 64, digest.hex() + ".mamba", "ключ"):
        assert len(key_bytes(odd)) == KEY_BYTES
    assert len({key_bytes(k) for k in ("a", "b", "a.mamba", digest.hex())}) == 4


def _other(value: Any) -> Any:
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, int):
        return value + 1
    return {**value, "more": "x"}


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint)])
def test_each_field_changes_the_namespace(name: str) -> None:
    other = replace(BASE, **{name: _other(getattr(BASE, name))})
    assert other.namespace_id != BASE.namespace_id
    assert BASE.differing_fields(other) == (name,)


def test_a_fingerprint_survives_its_words_and_the_order_of_extra_does_not_matter() -> None:
    a = replace(BASE, extra={"a": "1", "b": "2"})
    b = replace(BASE, extra={"b": "2", "a": "1"})
    assert a.namespace_id == b.namespace_id == Fingerprint.from_words(a.words()).namespace_id
    assert len(a.namespace_id) == NAMESPACE_BYTES
