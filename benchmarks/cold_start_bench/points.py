"""The points of the experiment: prefix lengths at one caller, callers at one length; their prompts; their figures."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness import Measurement, WarmRead, WrongBytes

from cold_start_bench.client import Answer, Client

PAGE_TOKENS = 64
TAIL_TOKENS = 8
"""Tokens of a prompt after its last whole page, so that every whole page can come from storage."""


@dataclass(frozen=True, slots=True)
class Point:
    """``tokens`` of prefix, ``callers`` different prompts at once, ``repeats`` times."""

    tokens: int
    callers: int
    repeats: int = 1

    @property
    def case(self) -> str:
        return f"{self.tokens} tokens x{self.callers}"

    def prompts(self, salt: int, repeat: int) -> list[list[int]]:
        """Prompts that no other point, repeat or salt shares a page with."""
        return [self._prompt(f"{salt}/{self.tokens}/{self.callers}/{repeat}/{i}") for i in range(self.callers)]

    def _prompt(self, name: str) -> list[int]:
        generator = random.Random(name)
        return [generator.randrange(3, 259) for _ in range(self.tokens + TAIL_TOKENS)]


def make_points(lengths: Sequence[int], callers: Sequence[int], busy_tokens: int, repeats: int) -> list[Point]:
    """Every length with one caller, and every number of callers at ``busy_tokens``."""
    points = [Point(t, 1, repeats) for t in lengths]
    return points + [Point(busy_tokens, c, 1) for c in callers if c > 1]


def measure_point(client: Client, point: Point, salt: int, new_tokens: int) -> list[tuple[list[Answer], float]]:
    """The point's requests, repeat by repeat."""
    return [client.generate_all(point.prompts(salt, r), new_tokens) for r in range(point.repeats)]


def as_measurement(point: Point, done: Sequence[tuple[Sequence[Answer], float]]) -> Measurement:
    """TTFT of every request, tokens per second over all, tokens by tier. All failed: RuntimeError."""
    answers = [a for own, _ in done for a in own]
    good = [a for a in answers if not a.error]
    if not good:
        raise RuntimeError(f"all {len(answers)} requests failed: {answers[0].error}")
    seconds = sum(s for _, s in done)
    asked = point.tokens * len(good)
    values = {
        "ttft_ms": statistics.median(a.ttft_s for a in good) * 1e3,
        "tokens_per_s": sum(a.prompt_tokens for a in good) / seconds,
        "storage_share": sum(a.tokens_from("storage") for a in good) / asked,
        "failed_requests": float(len(answers) - len(good)),
    }
    facts: dict[str, Any] = {
        "storage_tokens": [a.tokens_from("storage") for a in good],
        "errors": [a.error for a in answers if a.error],
        "output": [list(a.output) for a in answers],
    }
    return Measurement(values, {"request_ttft_ms": [a.ttft_s * 1e3 for a in good]}, facts)


def require_cold(done: Sequence[tuple[Sequence[Answer], float]], what: str) -> None:
    """Raise WarmRead when a prefix was still on the GPU or in host memory."""
    for answers, _ in done:
        for a in answers:
            warm = {t: a.tokens_from(t) for t in ("device", "host") if a.tokens_from(t) >= PAGE_TOKENS}
            if warm and not a.error:
                raise WarmRead(f"{what}: tokens still cached above storage: {warm}")


def require_same_tokens(expected: Sequence[Answer], got: Sequence[Answer], what: str) -> None:
    """Raise WrongBytes when a prompt is continued differently. Only for one caller: batching changes rounding."""
    for want, have in zip(expected, got, strict=True):
        if not want.error and not have.error and want.output != have.output:
            raise WrongBytes(f"{what}: output {have.output} instead of {want.output}")
