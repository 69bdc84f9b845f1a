"""Seeded generators of loads, for machines without a trace."""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulator.trace import TRACE_PAGE_TOKENS, Load, Request


class _PageIds:
    """Fresh page ids; each call starts a new, never repeated run of them."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        start, self._next = self._next, self._next + count
        return list(range(start, self._next))


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations that come back: each turn carries the whole history, the answer before it, and a new question.

    Attributes:
        sessions: conversations; they start evenly spread, at random, over ``starts_s`` seconds.
        turns: turns of each.
        first_tokens, turn_tokens: mean length of the first prompt and of what each turn adds.
        think_s: mean seconds between two turns of one conversation.
    """

    seed: int = 1
    sessions: int = 300
    turns: int = 6
    first_tokens: int = 16384
    turn_tokens: int = 4096
    think_s: float = 120.0
    starts_s: float = 300.0
    page_tokens: int = TRACE_PAGE_TOKENS

    def load(self) -> Load:
        rng, ids = random.Random(self.seed), _PageIds()
        requests: list[Request] = []
        for _ in range(self.sessions):
            now, pages = rng.uniform(0, self.starts_s), ids.take(self._pages(rng, self.first_tokens))
            for _ in range(self.turns):
                requests.append(_request(now, pages, self.page_tokens))
                pages = pages + ids.take(self._pages(rng, self.turn_tokens))
                now += rng.expovariate(1 / self.think_s)
        requests.sort(key=lambda r: r.arrival_s)
        return Load("multi_turn", self.page_tokens, tuple(requests), source=f"generator {self}")

    def _pages(self, rng: random.Random, tokens: int) -> int:
        return max(1, round(rng.uniform(0.5, 1.5) * tokens / self.page_tokens))


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Tool agents after a restart: L3 holds every agent's long system prompt, each question is short and new.

    Attributes:
        agents: different system prompts, picked with a Zipf-like skew of exponent ``skew``.
        system_tokens, question_tokens: mean lengths.
        rate_per_s: Poisson arrivals.
    """

    seed: int = 1
    requests: int = 1200
    agents: int = 400
    system_tokens: int = 16384
    question_tokens: int = 1536
    rate_per_s: float = 2.0
    skew: float = 0.3
    page_tokens: int = TRACE_PAGE_TOKENS

    def load(self) -> Load:
        rng, ids = random.Random(self.seed), _PageIds()
        prompts = [ids.take(self._pages(rng, self.system_tokens)) for _ in range(self.agents)]
        weights = [1 / (i + 1) ** self.skew for i in range(self.agents)]
        requests, now = [], 0.0
        for _ in range(self.requests):
            now += rng.expovariate(self.rate_per_s)
            pages = rng.choices(prompts, weights)[0] + ids.take(self._pages(rng, self.question_tokens))
            requests.append(_request(now, pages, self.page_tokens))
        stored = tuple(p for prompt in prompts for p in prompt)
        return Load("shared_prompt", self.page_tokens, tuple(requests), stored, f"generator {self}")

    def _pages(self, rng: random.Random, tokens: int) -> int:
        return max(1, round(rng.uniform(0.5, 1.5) * tokens / self.page_tokens))


def _request(now: float, pages: list[int], page_tokens: int) -> Request:
    return Request(now, len(pages) * page_tokens, 0, tuple(pages))
