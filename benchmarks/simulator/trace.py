"""Requests to replay, and the reader of Mooncake-style trace files.

A trace is never shipped: the user gives its path, and its SHA-256 is printed with every result.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hicache_ext.errors import ConfigError

TRACE_PAGE_TOKENS = 512
"""Tokens behind one entry of ``hash_ids``. Source: kvcache-ai/Mooncake, FAST25-release/traces (block size 512)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Attributes:
        arrival_s: seconds since the start of the load.
        input_tokens, output_tokens: lengths in tokens.
        pages: one id per page of the prompt, the last one possibly partial; equal ids mean equal prefixes.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """A replayable load: the same name, seed and parameters always give the same requests.

    Attributes:
        page_tokens: tokens per page id.
        requests: in order of arrival.
        stored: page ids that L3 holds before the first request (a restart with a warm drive).
        source: where it came from: path and SHA-256 of a trace, or generator, seed and parameters.
    """

    name: str
    page_tokens: int
    requests: tuple[Request, ...]
    stored: tuple[int, ...] = ()
    source: str = ""

    @property
    def duration_s(self) -> float:
        return self.requests[-1].arrival_s if self.requests else 0.0

    @property
    def input_tokens(self) -> int:
        return sum(r.input_tokens for r in self.requests)

    def head(self, requests: int) -> Load:
        """The first ``requests`` requests; used by smoke runs."""
        return Load(self.name, self.page_tokens, self.requests[:requests], self.stored, self.source)


def hit_rate_infinite(requests: Iterable[Request]) -> float:
    """Share of pages that an infinite cache would serve: contiguous prefix pages seen in any earlier request."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        for page in request.pages:
            if page not in seen:
                break
            hits += 1
        total += len(request.pages)
        seen.update(request.pages)
    return hits / total if total else 0.0


def read_trace(path: str | Path) -> Load:
    """Read a JSON-lines trace (timestamp in ms, input_length, output_length, hash_ids).

    Raises:
        ConfigError: the first thing that is wrong, with line and field.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise ConfigError(
            f"cannot read the trace: {e.strerror}", str(path), "give the path of a JSON-lines trace"
        ) from e
    requests: list[Request] = []
    last_ms = -math.inf
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            row = _Row(path, number, line)
            request = row.request()
            if request.arrival_s * 1000 < last_ms:
                row.refuse("timestamp", f"goes back from {last_ms:g} to {request.arrival_s * 1000:g}", "sort the trace")
            last_ms = request.arrival_s * 1000
            requests.append(request)
    if not requests:
        raise ConfigError("the trace is empty", str(path), "give a file with one JSON object a line")
    digest = hashlib.sha256(raw).hexdigest()
    return Load(path.stem, TRACE_PAGE_TOKENS, tuple(requests), source=f"{path.name} sha256:{digest}")


class _Row:
    """One line of a trace file and the messages about it."""

    def __init__(self, path: Path, number: int, line: bytes) -> None:
        self._where = f"{path}, line {number}"
        try:
            self._value: Any = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ConfigError("not JSON", self._where, "write one JSON object a line") from e
        if not isinstance(self._value, dict):
            raise ConfigError(f"a {type(self._value).__name__}, not an object", self._where, "write one object a line")

    def refuse(self, field: str, what: str, todo: str) -> None:
        raise ConfigError(f"{field} {what}", f"{self._where}, field {field!r}", todo)

    def request(self) -> Request:
        stamp = self._number("timestamp", (int, float))
        tokens = int(self._number("input_length", (int,)))
        output = int(self._number("output_length", (int,)))
        return Request(stamp / 1000, tokens, output, self._pages(tokens))

    def _get(self, field: str) -> Any:
        if field not in self._value:
            self.refuse(field, "is missing", "every line needs timestamp, input_length, output_length and hash_ids")
        return self._value[field]

    def _number(self, field: str, kinds: tuple[type, ...]) -> float:
        value = self._get(field)
        if isinstance(value, bool) or not isinstance(value, kinds):
            self.refuse(field, f"is {value!r}", "write a number")
        number = float(value)
        if not math.isfinite(number):
            self.refuse(field, f"is {value!r}", "write a number")
        if number < 0:
            self.refuse(field, f"is negative: {value}", "write zero or more")
        return number

    def _pages(self, tokens: int) -> tuple[int, ...]:
        pages: Sequence[Any] = self._get("hash_ids")
        if not isinstance(pages, list) or not all(type(p) is int for p in pages):
            self.refuse("hash_ids", "is not a list of whole numbers", "write one id per page")
        need = -(-tokens // TRACE_PAGE_TOKENS)
        if len(pages) != need:
            self.refuse(
                "hash_ids",
                f"has {len(pages)} ids for {tokens} tokens",
                f"write {need}, one per {TRACE_PAGE_TOKENS} tokens",
            )
        return tuple(pages)
