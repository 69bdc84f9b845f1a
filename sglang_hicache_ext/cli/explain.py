"""`hicache-ext explain`: why a prompt is, or is not, a hit: one outcome per page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hicache_ext.cli.inspect import words_text
from sglang_hicache_ext.cli.offline import handle_of, open_existing, pick_namespaces
from sglang_hicache_ext.cli.render import FINDINGS, OK, Output
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import hash_chain, key_bytes
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.storage_backends.nvme.survey import NamespaceSurvey


def run(paths: list[str], tokens: Sequence[int], namespace: str, threshold_tokens: int, out: Output) -> int:
    """Explain ``tokens`` against every matching namespace. OK when a namespace serves a prefix worth loading."""
    with open_existing(paths) as store:
        told = [_explain(store, n, tokens, threshold_tokens) for n in pick_namespaces(store, namespace)]
    out.document({"tokens": len(tokens), "namespaces": told})
    for one in told:
        out.line(f"namespace {one['namespace'][:8]}  {one['what']}")
        out.line(f"  {one['verdict']}")
        out.table(("pages", "outcome", "why"), [(r["pages"], r["outcome"], r["why"]) for r in one["runs"]])
    if not told:
        out.line("the store has no namespace yet: nothing was ever written")
    return OK if any(one["served_pages"] for one in told) else FINDINGS


def read_tokens(text: str, file: str, prompt: str, model: str) -> list[int]:
    """Token ids from ``--tokens "1 2 3"``, ``--tokens-file``, or ``--text`` with ``--model``. Raises ConfigError."""
    given = [name for name, value in (("--tokens", text), ("--tokens-file", file), ("--text", prompt)) if value]
    if len(given) != 1:
        raise ConfigError(
            f"got {', '.join(given) or 'no prompt'}", "explain", "give one of --tokens, --tokens-file, --text"
        )
    if prompt:
        return _tokenize(prompt, model)
    try:
        raw = Path(file).read_text() if file else text
    except OSError as err:
        raise ConfigError(f"cannot read tokens: {err.strerror}", file, "name a readable file") from err
    try:
        ids = json.loads(raw) if raw.lstrip().startswith("[") else [int(t) for t in raw.replace(",", " ").split()]
        if all(isinstance(t, int) and 0 <= t < 1 << 32 for t in ids):
            return list(ids)
    except (ValueError, TypeError):
        pass
    raise ConfigError("tokens are not a list of ids", given[0], "write ids from 0, divided by blanks, or a JSON list")


def _tokenize(prompt: str, model: str) -> list[int]:
    if not model:
        raise ConfigError("--text needs the tokenizer", "explain", "add --model DIRECTORY")
    try:
        from transformers import AutoTokenizer
    except ImportError as err:
        raise ConfigError("--text needs transformers", "explain", "use --tokens, or the environment of SGLang") from err
    try:
        return list(AutoTokenizer.from_pretrained(model, local_files_only=True)(prompt)["input_ids"])
    except (OSError, ValueError) as err:
        raise ConfigError(f"no tokenizer: {err}", model, "name a local model directory") from err


def _explain(store: NvmeStore, found: NamespaceSurvey, tokens: Sequence[int], threshold_tokens: int) -> dict[str, Any]:
    ns = handle_of(store, found)
    page_tokens = max(1, ns.fingerprint.page_tokens)
    keys = [key_bytes(k) for k in hash_chain(tokens, page_tokens)]
    outcomes = _with_holes(store.explain(ns, keys))
    served = next((i for i, (o, _) in enumerate(outcomes) if o is not Outcome.LOADED), len(outcomes))
    if 0 < served * page_tokens < threshold_tokens:
        outcomes[:served] = [(Outcome.BELOW_THRESHOLD, f"the hit is shorter than {threshold_tokens} tokens")] * served
        served = 0
    return {
        "namespace": found.id.hex(),
        "what": words_text(found.words),
        "page_tokens": page_tokens,
        "pages": len(keys),
        "served_pages": served,
        "verdict": _verdict(len(tokens), len(keys), served, page_tokens),
        "runs": _runs(outcomes),
    }


def _with_holes(outcomes: list[tuple[Outcome, str]]) -> list[tuple[Outcome, str]]:
    """Pages that are present behind a missing one cannot be used: the missing page is the hole they fall into."""
    out: list[tuple[Outcome, str]] = []
    hole: int | None = None
    for at, (outcome, why) in enumerate(outcomes):
        if hole is None and outcome is not Outcome.LOADED:
            hole = at
        is_behind = hole is not None and outcome is Outcome.LOADED
        out.append((Outcome.HOLE, f"present, but page {hole} is missing") if is_behind else (outcome, why))
    return out


def _verdict(tokens: int, pages: int, served: int, page_tokens: int) -> str:
    if not pages:
        return f"{tokens} tokens fill no page of {page_tokens}: nothing is ever looked up"
    return f"{served} of {pages} pages ({served * page_tokens} of {tokens} tokens) would be served"


def _runs(outcomes: list[tuple[Outcome, str]]) -> list[dict[str, Any]]:
    out = []
    for (outcome, why), group in itertools.groupby(enumerate(outcomes), key=lambda item: item[1]):
        at = [i for i, _ in group]
        pages = str(at[0]) if len(at) == 1 else f"{at[0]}-{at[-1]}"
        out.append({"pages": pages, "count": len(at), "outcome": str(outcome), "why": why})
    return out
