"""What is transferred: buffers, the order in which a forward fills them, and the facts both sides must share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import ConfigError

PAGE_SPACE = "page"
"""Index space of the KV pages. Every other space ("aux", "state", ...) travels with the last chunk of a request."""
MAX_LAYERS = 4096


class PeerMismatchError(ConfigError):
    """Two sides that cannot exchange pages; names each differing fact with both values."""


@dataclass(frozen=True, slots=True)
class LayerBuffer:
    """A registered run of equal items: item i lies at ``addr + i * item_bytes``.

    Attributes:
        name: unique, equal on both sides: "k.0", "v.0", "draft.k.0", "draft_hidden".
        layer: step of the forward after which it may be sent, from 0. A draft model's layers count on after the target's;
            buffers filled after the forward (first token, hidden states) take the last number.
        addr: of item 0, in host memory, or device memory where ``device`` says so.
        item_bytes: bytes of one page (or one auxiliary slot) in this buffer.
        items: how many; may differ between the sides.
        space: which index array of a transfer addresses it.
        device: -1 host memory, otherwise the CUDA device.
    """

    name: str
    layer: int
    addr: int
    item_bytes: int
    items: int
    space: str = PAGE_SPACE
    device: int = -1


@dataclass(frozen=True)
class Geometry:
    """The buffers of one side with the facts that decide what their bytes mean.

    Args:
        buffers: in any order; every layer from 0 to the highest must have one.
        facts: what must be equal beside the shapes: dtype, page_tokens, kv_heads, head_dim, tp, model, versions.

    Raises:
        ConfigError: a buffer that cannot be addressed.
    """

    buffers: tuple[LayerBuffer, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.buffers:
            raise ConfigError("no buffer to transfer", "PD geometry", "register the layers' K and V buffers")
        names = [b.name for b in self.buffers]
        if len(set(names)) != len(names):
            raise ConfigError("a buffer name is used twice", "PD geometry", "give every buffer its own name")
        for b in self.buffers:
            if b.item_bytes <= 0 or b.items <= 0 or b.addr <= 0 or not 0 <= b.layer < MAX_LAYERS:
                raise ConfigError(f"buffer {b.name} is {b}", "PD geometry", "addr, item_bytes, items must be positive")
        absent = sorted(set(range(self.layers)) - {b.layer for b in self.buffers})
        if absent:
            raise ConfigError(f"layers {absent[:8]} have no buffer", "PD geometry", "number the layers without a gap")

    @property
    def layers(self) -> int:
        """Steps of a forward, draft layers and the last step included."""
        return 1 + max(b.layer for b in self.buffers)

    def items(self, space: str) -> int:
        """Item ids of ``space`` that every buffer of it has; 0 for a space without buffers."""
        return items_of(self.buffers, space)

    def words(self) -> dict[str, Any]:
        """JSON-ready, without addresses."""
        rows = [[b.name, b.layer, b.item_bytes, b.items, b.space] for b in self.buffers]
        return {"facts": dict(sorted(self.facts.items())), "buffers": rows}


def misplaced(space: str, items: NDArray[np.int64], limit: int, whose: str = "this side") -> str:
    """Say which ids are outside [0, limit); "" when none is."""
    if not len(items) or (int(items.min()) >= 0 and int(items.max()) < limit):
        return ""
    return f"{space} ids from {int(items.min())} to {int(items.max())}, {whose} has {limit}"


def items_of(buffers: Sequence[LayerBuffer], space: str) -> int:
    return min((b.items for b in buffers if b.space == space), default=0)


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Compare two ``Geometry.words``; one line per difference, with both values. Pool sizes may differ."""
    lines = [
        f"{name}: here {here['facts'].get(name, 'not given')!r}, peer {there['facts'].get(name, 'not given')!r}"
        for name in sorted({*here["facts"], *there["facts"]})
        if here["facts"].get(name) != there["facts"].get(name)
    ]
    layers_here, layers_there = _layers(here["buffers"]), _layers(there["buffers"])
    if layers_here != layers_there:
        lines.append(f"layers: here {layers_here}, peer {layers_there}")
    if len(here["buffers"]) != len(there["buffers"]):
        lines.append(f"buffers: here {len(here['buffers'])}, peer {len(there['buffers'])}")
    for mine, theirs in zip(here["buffers"], there["buffers"], strict=False):
        for what, a, b in zip(("name", "layer", "item_bytes", "items", "space"), mine, theirs, strict=True):
            if a != b and what != "items":
                lines.append(f"buffer {mine[0]} {what}: here {a!r}, peer {b!r}")
    return lines


def _layers(rows: Sequence[Sequence[Any]]) -> int:
    return 1 + max((int(r[1]) for r in rows), default=-1)
