"""Which register limit a specialization is compiled with: the first of a few that it fits without a spill.

Left alone the compiler aims at a number of resident CTAs and then spills a word or two, or takes more registers than a
tile may have. Told a number it mostly finds a schedule without a spill, but no number suits all specializations:
decision 0009. So the numbers are tried, at the first launch of each specialization.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from sglang_hicache_ext.kernels.l2_prefetch.tuning import KV_BYTES, Tile

MOST_REGISTERS = 128
"""Of head dim 128 in 16 bits; more would cost a resident CTA."""


def _is_limited(tile: Tile) -> bool:
    return tile.head_dim == 128 and KV_BYTES[tile.kv] == 2


def candidates(tile: Tile) -> tuple[int | None, ...]:
    """Limits to try, in order; None leaves the compiler alone."""
    return (None, MOST_REGISTERS, 120, 112) if _is_limited(tile) else (None, 128, 168, 255)


def fits(tile: Tile, registers: int, spills: int) -> bool:
    """Whether a compiled specialization is as it should be. ``spills``: in any unit, 0 is required."""
    return spills == 0 and (registers <= MOST_REGISTERS or not _is_limited(tile))


def first_fit(tile: Tile, build: Callable[[int | None], tuple[Any, int, int]]) -> tuple[int | None, Any]:
    """(limit, what was built) of the first candidate that fits, or else of the one that spills least.

    Args:
        build: ``build(limit)`` returns (anything, registers, spills).
    """
    tried: list[tuple[int, int, int | None, Any]] = []
    for limit in candidates(tile):
        built, registers, spills = build(limit)
        if fits(tile, registers, spills):
            return limit, built
        tried.append((spills, registers, limit, built))
    _, _, limit, built = min(tried, key=lambda t: t[:2])
    return limit, built


class ChosenLimits:
    """The limit of each specialization that was launched. Thread-safe: a lost race costs a launch.

    A launch with another limit writes the same output again, so trying is safe at any time; inside a CUDA graph
    capture it would only be recorded more than once, and SGLang launches once before it captures.
    """

    def __init__(self) -> None:
        self._chosen: dict[Hashable, int | None] = {}

    def launch(self, key: Hashable, tile: Tile, launch: Callable[[dict[str, int]], Any]) -> None:
        """Launch with the limit known for ``key``, or find it.

        Args:
            launch: takes Triton launch options, returns Triton's compiled kernel.
        """

        def build(limit: int | None) -> tuple[Any, int, int]:
            compiled = launch({} if limit is None else {"maxnreg": limit})
            # a Triton that does not say counts as a fit: the first candidate is what it would do by itself
            return compiled, int(getattr(compiled, "n_regs", 0) or 0), int(getattr(compiled, "n_spills", 0) or 0)

        if key in self._chosen:
            limit = self._chosen[key]
            launch({} if limit is None else {"maxnreg": limit})
        else:
            self._chosen[key], _ = first_fit(tile, build)
