"""Cases of the interpreter tests: a seeded pairwise cover of all features, and the tensors of a case."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch

from sglang_hicache_ext.kernels.l2_prefetch.check import DecodeParams, KvIndex

SEED = 20261129
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "group": tuple(range(1, 17)),
    "pool": (
        ("NHD", 1, "tokens"),
        ("NHD", 1, "pages"),
        ("NHD", 16, "pages"),
        ("NHD", 64, "pages"),
        ("HND", 16, "pages"),
        ("HND", 64, "pages"),
        ("HND", 16, "tokens"),
    ),
    "head_dim": (64, 128, 256),
    "query": (torch.float16, torch.bfloat16),
    "kv": (None, torch.float8_e4m3fn, torch.float8_e5m2),
    "window": (0, 1, 50, 128),
    "soft_cap": (0.0, 30.0),
    "sinks": (False, True),
    "prefetch": (("none", 0), ("line", 0), ("line", 1), ("line", 3), ("bulk", 2), ("bulk", 4)),
    "pdl": (False, True),
    "strided": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One call; see DIMENSIONS. ``lengths`` and ``splits`` are per request."""

    group: int
    pool: tuple[str, int, str]
    head_dim: int
    query: torch.dtype
    kv: torch.dtype | None
    window: int
    soft_cap: float
    sinks: bool
    prefetch: tuple[str, int]
    pdl: bool
    strided: bool
    lengths: tuple[int, ...] = (0, 1, 130)
    splits: tuple[int, ...] = (2, 16, 3)
    kv_heads: int = 1

    @property
    def params(self) -> DecodeParams:
        scales = (0.5, 2.0) if self.kv else (1.0, 1.0)
        layout, page, _ = self.pool
        return DecodeParams(self.head_dim**-0.5, *scales, self.window, self.soft_cap, page, layout)

    @property
    def tolerance(self) -> float:
        return 2e-3 if self.query is torch.float16 else 6e-3

    def __str__(self) -> str:
        text = "-".join(str(v).replace("torch.", "") for k, v in vars(self).items())
        return text.replace(" ", "").replace("'", "").replace("[", "").replace("]", "")


def pairwise(seed: int = SEED) -> list[dict[str, Any]]:
    """Greedy cover: every pair of values of every two dimensions occurs in some case."""
    rng = random.Random(seed)
    names = list(DIMENSIONS)
    todo = {
        (a, x, b, y)
        for a, b in combinations(names, 2)
        for x, y in product(range(len(DIMENSIONS[a])), range(len(DIMENSIONS[b])))
    }
    cases = []
    while todo:
        a, x, b, y = min(todo)
        best: dict[str, int] = {}
        gain = -1
        for _ in range(40):
            pick = {n: rng.randrange(len(DIMENSIONS[n])) for n in names} | {a: x, b: y}
            new = sum((p, pick[p], q, pick[q]) in todo for p, q in combinations(names, 2))
            if new > gain:
                best, gain = pick, new
        todo -= {(p, best[p], q, best[q]) for p, q in combinations(names, 2)}
        cases.append({n: DIMENSIONS[n][i] for n, i in best.items()})
    return cases


def covering_cases() -> list[Case]:
    """The pairwise cover; over all of it every length 0..200 and every split count 1..64 occurs."""
    rng = random.Random(SEED)
    lengths, splits = _endless(range(201), rng), _endless(range(1, 65), rng)
    out = []
    for pick in pairwise():
        counts = (next(splits), rng.randint(1, 3))
        kv_heads = 2 if counts[0] <= 8 or rng.random() < 0.1 else 1  # CTAs are what the interpreter takes time for
        out.append(Case(**pick, lengths=(next(lengths), next(lengths)), splits=counts, kv_heads=kv_heads))
    return out


FULL_PARTS = 31
"""The product is walked in so many parts. A prime that divides no dimension, so each part has its share of every feature."""


def full_cases() -> Iterator[Case]:
    """The product of all features, over a few groups; lengths and splits walk through their ranges.

    Few splits come oftener than many: 200 tokens are at most 7 tiles, and the CTA of an empty split leaves at once.
    """
    rng = random.Random(SEED + 1)
    lengths = _endless(range(201), rng)
    splits = _endless([n for n in range(1, 65) for _ in range(64 // n)], rng)
    names = [n for n in DIMENSIONS if n != "strided"]
    values = [DIMENSIONS[n] if n != "group" else (1, 4, 7, 16) for n in names]
    for pick in product(*values):
        extra: dict[str, Any] = {"strided": rng.random() < 0.5, "kv_heads": rng.choice((1, 2))}
        yield Case(**dict(zip(names, pick, strict=True)), **extra, lengths=(next(lengths),), splits=(next(splits),))


def every_length_cases(group: int) -> Iterator[Case]:
    """All lengths 0..200 in one call for each split count 1..8 and one in 16 of 9..64; the features are drawn.

    Over all groups: every length with every split count and with every group, the three together up to 8 splits.
    """
    rng = random.Random(SEED + 1 + group)
    for count in (n for n in range(1, 65) if n <= 8 or n % 16 == group % 16):
        pick = {n: rng.choice(values) for n, values in DIMENSIONS.items()} | {"group": group}
        yield Case(**pick, lengths=tuple(rng.sample(range(201), 201)), splits=(count,) * 201)


def _endless(values: Sequence[int], rng: random.Random) -> Iterator[int]:
    while True:
        yield from rng.sample(values, len(values))


@dataclass
class Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index: KvIndex
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    guards: torch.Tensor


def make_tensors(case: Case, seed: int = 0) -> Tensors:
    """Random tensors; outputs poisoned with NaN inside a guarded, strided buffer when ``case.strided``."""
    g = torch.Generator().manual_seed(seed)
    layout, page, unit = case.pool
    batch, heads, dim = len(case.lengths), case.group * case.kv_heads, case.head_dim
    pages_of = [-(-n // page) for n in case.lengths]
    pages = sum(pages_of) + 3
    shape = (pages * page, case.kv_heads, dim) if layout == "NHD" else (pages, case.kv_heads, page, dim)
    kv = case.kv or case.query

    def pool() -> torch.Tensor:
        wide = (shape[0], 2, *shape[1:]) if case.strided else shape
        data = torch.randn(wide, generator=g).to(case.query).to(kv)
        return data[:, 1] if case.strided else data

    order = torch.randperm(pages, generator=g)
    entries, indptr, at = [], [0], 0
    for n, count in zip(case.lengths, pages_of, strict=True):
        mine = order[at : at + count]
        at += count
        if unit == "tokens":
            mine = (mine[:, None] * page + torch.arange(page)).reshape(-1)[:n]
        entries.append(mine)
        indptr.append(indptr[-1] + len(mine))
    lens = None if unit == "tokens" else torch.tensor(case.lengths, dtype=torch.int32)
    index = KvIndex(torch.tensor(indptr, dtype=torch.int32), torch.cat(entries), lens)
    q = torch.randn(batch, heads, dim, generator=g).to(case.query)
    room = torch.full((batch, heads + 2, dim + 16), float("nan"), dtype=case.query)
    out = room[:, 1:-1, :dim] if case.strided else torch.full_like(q, float("nan"))
    lse_room = torch.full((batch, heads + 3), float("nan"))
    lse = lse_room[:, 2 : 2 + heads] if case.strided else torch.full((batch, heads), float("nan"))
    sinks = torch.randn(heads, generator=g) if case.sinks else None
    return Tensors(q, pool(), pool(), index, sinks, out, lse, room)
