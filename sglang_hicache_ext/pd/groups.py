"""Which layers go together. Pure decisions over a geometry and a number of pages.

A group costs a post and a note, so it should be large; what stays visible after the forward is the last group, so that
one should be small. Groups are therefore cut from the last layer backwards: each is the smallest run of layers that reaches
the wanted bytes, and what is left over joins the first, which is hidden anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.pd.geometry import PAGE_SPACE, Geometry
from sglang_hicache_ext.pd.settings import PdSettings


@dataclass(frozen=True, slots=True)
class Group:
    """Layers [start, stop) and the positions of their buffers."""

    start: int
    stop: int
    buffers: tuple[int, ...]


class GroupPlanner:
    """Plans for one geometry. Immutable."""

    def __init__(self, geometry: Geometry, settings: PdSettings) -> None:
        self._settings = settings
        self.geometry = geometry
        places = {b.device for b in geometry.buffers if b.space == PAGE_SPACE}
        extra = {b.device for b in geometry.buffers if b.space != PAGE_SPACE}
        if len(places) > 1 or len(extra) > 1:
            raise ConfigError(
                f"page buffers lie on devices {sorted(places)}, further ones on {sorted(extra)}",
                "PD geometry",
                "give all page buffers one device, and all others one",
            )

    @cached_property
    def page_layers(self) -> tuple[int, ...]:
        """The layers that have page buffers, ascending."""
        return tuple(sorted({b.layer for b in self.geometry.buffers if b.space == PAGE_SPACE}))

    @cached_property
    def layer_bytes(self) -> dict[int, int]:
        """Bytes of one page per layer with page buffers."""
        sums = dict.fromkeys(self.page_layers, 0)
        for b in self.geometry.buffers:
            if b.space == PAGE_SPACE:
                sums[b.layer] += b.item_bytes
        return sums

    @cached_property
    def page_bytes(self) -> int:
        return sum(self.layer_bytes.values())

    @cached_property
    def extra(self) -> Group | None:
        """The buffers of all further index spaces: they go together, at the end of the last chunk."""
        found = [i for i, b in enumerate(self.geometry.buffers) if b.space != PAGE_SPACE]
        return Group(0, self.geometry.layers, tuple(found)) if found else None

    @cached_property
    def extra_spaces(self) -> frozenset[str]:
        return frozenset(b.space for b in self.geometry.buffers) - {PAGE_SPACE}

    def plan(self, pages: int, *, layered: bool) -> tuple[Group, ...]:
        """Groups of a chunk, in the order of their layers; together they cover every layer once. () without pages."""
        if pages <= 0 or not self.page_layers:
            return ()
        if not layered or pages * self.page_bytes < self._settings.layered_min:
            return (self._group(0, len(self.page_layers)),)
        cuts, stop, size = list[int](), len(self.page_layers), 0
        for at in range(len(self.page_layers) - 1, -1, -1):
            size += pages * self.layer_bytes[self.page_layers[at]]
            if size >= self._settings.group:
                cuts.append(at)
                stop, size = at, 0
        if stop and cuts:
            cuts[-1] = 0  # the rest joins the first group
        bounds = [*reversed(cuts or [0]), len(self.page_layers)]
        return tuple(self._group(a, b) for a, b in pairwise(bounds))

    def _group(self, first: int, stop: int) -> Group:
        start_layer, stop_layer = self.page_layers[first], self.page_layers[stop - 1] + 1
        found = [
            i
            for i, b in enumerate(self.geometry.buffers)
            if b.space == PAGE_SPACE and start_layer <= b.layer < stop_layer
        ]
        return Group(start_layer, stop_layer, tuple(found))
