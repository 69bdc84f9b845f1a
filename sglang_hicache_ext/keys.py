"""Page keys (SGLang's hash chain) and the fingerprint that names what the bytes are.

A page is found by (namespace, key). The key says which tokens; the namespace, a digest of the
fingerprint, says everything else that changes bytes. A different fingerprint is a miss, never data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

FORMAT_VERSION = 1
"""Bump when the meaning of stored bytes changes; every older page then misses."""

KEY_BYTES = 32
NAMESPACE_BYTES = 16


def hash_chain(tokens: Sequence[int], page_tokens: int, prior_hash: str = "") -> list[str]:
    """Hash every whole page of ``tokens``, each hash covering all pages before it.

    Args:
        tokens: token ids, 0 <= id < 2**32.
        page_tokens: tokens per page; a trailing partial page has no hash.
        prior_hash: 64 hex digits of the page before ``tokens[0]``, "" at the start of a sequence.

    Returns:
        64-digit hex SHA-256 per whole page.

    Source: sglang 0.5.23 srt/mem_cache/utils.py:111-152 (plain prompts, byte for byte).
    """
    raw = np.asarray(tokens, dtype="<u4").tobytes()
    step = 4 * page_tokens
    digest = bytes.fromhex(prior_hash)
    out = []
    for start in range(0, len(raw) - step + 1, step):
        digest = hashlib.sha256(digest + raw[start : start + step]).digest()
        out.append(digest.hex())
    return out


def key_bytes(key: str) -> bytes:
    """Turn a page key into KEY_BYTES raw bytes: a 64-digit hex hash as it is, anything else hashed."""
    if len(key) == 2 * KEY_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return hashlib.sha256(b"hicache-ext-key\0" + key.encode()).digest()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything beside the tokens that decides a page's bytes. Two unequal fingerprints never share a page.

    Attributes:
        model: weight identity (hash over the weights' headers or contents), not a path.
        config_hash: hash of the model config after overrides (RoPE scaling, ...).
        dtype: KV dtype, for example "torch.bfloat16".
        page_tokens, layout, layer_start, layer_end, heads, k_dim, v_dim: geometry of the shard.
        tp, pp, cp, dcp: "rank/size" of each parallel axis that shards the bytes; "-" where replicated.
        pool: SGLang's pool name ("kv", "indexer", "mamba", ...).
        adapter: adapter namespace, "" without one.
        epoch: weight epoch; every weight update of a running server starts a new one.
        namespace: the operator's own addition; adds to the identity, never replaces it.
        extra: further facts, name -> value.
        format_version: of this package.
    """

    model: str
    config_hash: str = ""
    dtype: str = ""
    page_tokens: int = 0
    layout: str = ""
    layer_start: int = 0
    layer_end: int = 0
    heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    tp: str = "-"
    pp: str = "-"
    cp: str = "-"
    dcp: str = "-"
    pool: str = "kv"
    adapter: str = ""
    epoch: str = ""
    namespace: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def words(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict; this is what stores write beside the namespace id."""
        d = asdict(self)
        d["extra"] = dict(sorted(self.extra.items()))
        return d

    def canonical(self) -> bytes:
        return json.dumps(self.words(), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @property
    def namespace_id(self) -> bytes:
        """NAMESPACE_BYTES bytes: the digest that prefixes every key."""
        return hashlib.sha256(b"hicache-ext-fingerprint\0" + self.canonical()).digest()[:NAMESPACE_BYTES]

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> Fingerprint:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in words.items() if k in known})

    def differing_fields(self, other: Fingerprint) -> tuple[str, ...]:
        """Name the fields that differ; used to explain a mismatch."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))
