from __future__ import annotations

import re

import pytest

from sglang_hicache_ext.storage_backends.remote import wire
from sglang_hicache_ext.storage_backends.remote.wire import ObjectNames

NS, OTHER_NS = b"n" * 16, b"o" * 16
KEYS = [bytes([i]) * 32 for i in range(4)]


def test_names_depend_on_secret_tenant_namespace_and_key() -> None:
    makers = [ObjectNames("a", b"s" * 32), ObjectNames("a", b"t" * 32), ObjectNames("b", b"s" * 32)]
    names = [n for m in makers for ns in (NS, OTHER_NS) for n in m.names(ns, KEYS)]
    assert len(set(names)) == 3 * 2 * len(KEYS)


def test_names_are_stable_and_do_not_show_the_key() -> None:
    names = ObjectNames("a", b"s" * 32).names(NS, KEYS)
    assert names == ObjectNames("a", b"s" * 32).names(NS, KEYS)
    assert all(re.fullmatch(r"hx1\.[0-9a-f]{16}\.[0-9a-f]{32}", n) for n in names)
    assert not any(k.hex()[:16] in n for k, n in zip(KEYS, names, strict=True))


def test_all_names_of_a_namespace_share_its_prefix_and_no_other_does() -> None:
    maker = ObjectNames("a", b"s" * 32)
    assert all(n.startswith(maker.prefix(NS)) for n in maker.names(NS, KEYS))
    assert not any(n.startswith(maker.prefix(NS)) for n in maker.names(OTHER_NS, KEYS))


def test_the_proof_differs_by_secret_but_its_name_does_not() -> None:
    one, two = ObjectNames("a", b"s" * 32), ObjectNames("a", b"t" * 32)
    assert one.proof_name == two.proof_name
    assert one.proof != two.proof
    assert one.proof_name != ObjectNames("b", b"s" * 32).proof_name


@pytest.mark.parametrize("byte", range(wire.HEADER_BYTES - 8))
def test_a_header_with_any_byte_changed_is_refused_or_gives_another_digest(byte: int) -> None:
    header = bytearray(wire.encode_header(NS, 4096, b"d" * 16))
    assert wire.stored_digest(header, NS, 4096) == b"d" * 16
    header[byte] ^= 1
    assert wire.stored_digest(header, NS, 4096) != b"d" * 16


def test_a_header_of_another_namespace_or_length_is_refused() -> None:
    header = wire.encode_header(NS, 4096, b"d" * 16)
    assert wire.stored_digest(header, OTHER_NS, 4096) is None
    assert wire.stored_digest(header, NS, 8192) is None
