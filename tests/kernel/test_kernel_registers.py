"""The register limit of a specialization: the first candidate without a spill, found once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sglang_hicache_ext.kernels.l2_prefetch.registers import ChosenLimits, candidates, first_fit, fits
from sglang_hicache_ext.kernels.l2_prefetch.tuning import Tile, load_table

TILES = {(t.head_dim, t.kv): t for t in load_table().tiles}
LIMITED, FREE = TILES[128, "bf16"], TILES[256, "fp8"]


@dataclass
class Compiled:
    n_regs: int
    n_spills: int


class Compiler:
    """Says what each limit gives and counts the launches."""

    def __init__(self, results: dict[int | None, tuple[int, int]]) -> None:
        self.results = results
        self.launches: list[int | None] = []

    def __call__(self, options: dict[str, int]) -> Compiled:
        limit = options.get("maxnreg")
        self.launches.append(limit)
        return Compiled(*self.results[limit])


@pytest.mark.parametrize(
    ("tile", "results", "want"),
    [
        (LIMITED, {None: (122, 0)}, [None]),
        (LIMITED, {None: (141, 0), 128: (128, 8), 120: (113, 0)}, [None, 128, 120]),
        (FREE, {None: (192, 0)}, [None]),
        (FREE, {None: (168, 2), 128: (128, 40), 168: (168, 1), 255: (219, 0)}, [None, 128, 168, 255]),
    ],
)
def test_the_first_limit_that_needs_no_spill_is_kept(
    tile: Tile, results: dict[int | None, tuple[int, int]], want: list[int | None]
) -> None:
    compiler, chosen = Compiler(results), ChosenLimits()
    chosen.launch("one", tile, compiler)
    assert compiler.launches == want
    chosen.launch("one", tile, compiler)
    assert compiler.launches == [*want, want[-1]], "found once"
    chosen.launch("another", tile, compiler)
    assert compiler.launches == [*want, want[-1], *want]


def test_when_none_fits_the_one_that_spills_least_is_used() -> None:
    results = dict.fromkeys(candidates(LIMITED), (128, 9)) | {120: (120, 2)}
    compiler, chosen = Compiler(results), ChosenLimits()
    chosen.launch("one", LIMITED, compiler)
    chosen.launch("one", LIMITED, compiler)
    assert compiler.launches[-1] == 120
    assert first_fit(LIMITED, lambda limit: (limit, *results[limit])) == (120, 120)


def test_a_compiler_that_does_not_say_is_taken_as_it_is() -> None:
    launches: list[dict[str, int]] = []
    ChosenLimits().launch("one", LIMITED, launches.append)
    assert launches == [{}]


def test_only_head_dim_128_in_16_bits_has_a_most() -> None:
    assert not fits(LIMITED, 129, 0) and fits(LIMITED, 128, 0) and not fits(LIMITED, 90, 1)
    assert fits(FREE, 255, 0) and not fits(FREE, 168, 1)
    assert all(candidates(tile)[0] is None for tile in TILES.values())
