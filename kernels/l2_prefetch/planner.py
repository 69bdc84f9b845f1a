"""How many splits, which tile, and whether to prefetch. Pure Python: no torch, no device.

One CTA works on (request, KV head, split). The lengths decide how many tokens a CTA gets, so that a
ragged batch gives every CTA about the same work; there is no fixed cap on the splits of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.kernels.l2_prefetch.tuning import Gpu, Table, Tile, load_table

WAVES = 2
"""CTAs aimed at per SM. Two fill the memory system; more only add partial results."""
MIN_SPLIT_TOKENS = 256
"""A shorter split costs more in the combine kernel than it wins."""
L2_SHARE = 0.25
"""Part of L2 that prefetched bytes may hold; L2 is two partitions and also serves the loads."""
MAX_GROUP = 4
IN_FLIGHT_LATENCY_S = 1e-6
IN_FLIGHT_MARGIN = 1.5
DISTANCES = (4, 3, 2, 1)
MODES = ("off", "auto", "on")


@dataclass(frozen=True, slots=True)
class Shape:
    """What one decode call works on.

    Attributes:
        query_heads, kv_heads: heads of this rank.
        head_dim: 64, 128 or 256.
        kv: "bf16", "fp16" or "fp8".
        page_tokens: tokens per page of the pool.
        layout: "NHD" or "HND".
        window: sliding window in tokens; 0 is none.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    kv: str
    page_tokens: int = 1
    layout: str = "NHD"
    window: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads <= 0 or self.query_heads <= 0 or self.query_heads % self.kv_heads:
            raise ConfigError(
                f"{self.query_heads} query heads do not divide by {self.kv_heads} KV heads", "l2_prefetch planner"
            )

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The switch: ``form`` is compiled in, ``distance`` (tiles ahead) may be lowered to 0 on the device."""

    form: str
    distance: int
    pdl: bool
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a launch needs, and the reasons.

    Attributes:
        tile: block, stages, warps.
        splits: per request; 1 for an empty one, so that its output is written.
        prefetch: form, distance, PDL.
        why: one sentence per decision.
    """

    tile: Tile
    splits: tuple[int, ...]
    prefetch: Prefetch
    why: tuple[str, ...]

    @property
    def items(self) -> int:
        """(request, split) pairs; CTAs = items x KV heads."""
        return sum(self.splits)


def split_tokens(total_tokens: int, kv_heads: int, sms: int, block_tokens: int) -> int:
    """Most tokens one CTA gets: total work over WAVES x SMs, a multiple of the tile, at least MIN_SPLIT_TOKENS."""
    even = -(-kv_heads * total_tokens // (WAVES * max(1, sms)))
    each: int = -(-max(MIN_SPLIT_TOKENS, even) // block_tokens) * block_tokens
    return each


def split_counts(lengths: Sequence[int], kv_heads: int, sms: int, block_tokens: int) -> tuple[int, ...]:
    """Splits per request. Empty requests get one. The device kernel in schedule.py computes the same."""
    each = split_tokens(sum(lengths), kv_heads, sms, block_tokens)
    return tuple(max(1, -(-n // each)) for n in lengths)


def item_bound(batch: int, kv_heads: int, sms: int) -> int:
    """Upper bound of ``sum(split_counts)`` for any lengths: the fixed grid of a CUDA graph."""
    return batch + WAVES * max(1, sms) // kv_heads


def distance_for(lengths: Sequence[int], kv_heads: int, sms: int, tile: Tile, distance: int) -> int:
    """``distance``, or 0 when a split has too few tiles for it to run ahead. Also computed on the device."""
    each = split_tokens(sum(lengths), kv_heads, sms, tile.block_tokens)
    longest = min(each, max(lengths, default=0))
    tiles: int = -(-longest // tile.block_tokens)
    return distance if tiles > min_tiles(tile) else 0


def min_tiles(tile: Tile) -> int:
    """A split of this many tiles or fewer is over before prefetch has run ahead."""
    depth: int = tile.depth
    return 2 * depth


def _form(shape: Shape) -> str:
    return "bulk" if shape.layout == "HND" and shape.page_tokens >= 16 else "line"


def resident_ctas(gpu: Gpu, shape: Shape, tile: Tile, batch: int) -> int:
    """CTAs that run at once: what fits on the GPU, or the whole grid when that is smaller."""
    fitting: int = tile.ctas_per_sm(gpu) * gpu.sms
    return min(fitting, item_bound(batch, shape.kv_heads, gpu.sms) * shape.kv_heads)


def _fitting_distance(gpu: Gpu, tile: Tile, ctas: int, most: int) -> int:
    """Largest distance above the loop's own depth whose bytes stay inside the L2 share; 0 when none does."""
    per_tile = tile.tile_bytes * ctas
    fit = [d for d in DISTANCES if tile.depth < d <= most and d * per_tile <= L2_SHARE * gpu.l2_bytes]
    return max(fit, default=0)


def _refusal(gpu: Gpu, shape: Shape, tile: Tile, table: Table, ctas: int) -> str:
    """Why ``auto`` leaves prefetch off; "" when nothing speaks against it."""
    if gpu.sm < 90:
        return f"SM {gpu.sm / 10:.1f} is below 9.0"
    if shape.group > MAX_GROUP:
        return f"{shape.group} query heads per KV head; above {MAX_GROUP} the loads are spread over enough work"
    if not table.is_measured(gpu.name):
        return f"{gpu.name} has no measurements"
    if tile.measured:
        return "" if tile.distance else f"measured for this shape: no gain ({tile.gain_percent:+.1f} %)"
    in_flight = tile.depth * tile.tile_bytes * ctas // gpu.sms
    needed = IN_FLIGHT_MARGIN * gpu.bandwidth * IN_FLIGHT_LATENCY_S / gpu.sms
    if in_flight >= needed and not tile.pdl:
        return f"{in_flight} bytes per SM already in flight, {needed:.0f} fill the memory"
    return ""


def choose_prefetch(gpu: Gpu, shape: Shape, tile: Tile, batch: int, mode: str, table: Table) -> Prefetch:
    """Decide what does not depend on the lengths, and so holds for a CUDA graph of ``batch`` requests.

    Args:
        mode: "off"; "auto" follows the measured table and the rules; "on" asks for it, and only
            the L2 share and too short splits still switch it off.
    """
    if mode not in MODES:
        raise ConfigError(f"prefetch mode {mode!r}", "l2_prefetch planner", f"write one of {', '.join(MODES)}")
    pdl = tile.pdl and gpu.sm >= 90
    if mode == "off":
        return Prefetch("none", 0, False, ("prefetch off: asked for",))
    ctas = resident_ctas(gpu, shape, tile, batch)
    reason = _refusal(gpu, shape, tile, table, ctas) if mode == "auto" else ""
    if reason:
        return Prefetch("none", 0, pdl, (f"prefetch off: {reason}",))
    most = tile.distance if tile.measured and tile.distance else max(DISTANCES)
    distance = _fitting_distance(gpu, tile, ctas, most)
    if not distance:
        held = tile.tile_bytes * ctas * (tile.depth + 1)
        text = f"prefetch off: {held} bytes ahead exceed {L2_SHARE:.0%} of {gpu.l2_bytes} bytes of L2"
        return Prefetch("none", 0, False, (text,))
    form = tile.form if tile.measured and tile.form != "none" else _form(shape)
    if gpu.sm < 90:
        form = "line"
    why = f"prefetch {form}, {distance} tiles ahead: " + ("asked for" if mode == "on" else "measured table and rules")
    return Prefetch(form, distance, pdl, (why,))


def make_plan(gpu: Gpu, shape: Shape, lengths: Sequence[int], mode: str = "auto", table: Table | None = None) -> Plan:
    """Plan one decode call.

    Args:
        gpu: the device; see ``tuning.json`` for known ones.
        shape: heads, dtype, pool layout.
        lengths: tokens in the cache of each request, 0 allowed.
        mode: "off", "auto" or "on".
        table: another tuning table than the shipped one.

    Raises:
        ConfigError: no tile for this head dimension or dtype, negative length, unknown mode.
    """
    if any(n < 0 for n in lengths):
        raise ConfigError(f"negative length in {list(lengths)[:8]}", "l2_prefetch planner")
    table = table or load_table()
    tile = table.tile(gpu.name, shape.group, shape.head_dim, shape.kv)
    seen = [min(n, shape.window) if shape.window else n for n in lengths]
    splits = split_counts(seen, shape.kv_heads, gpu.sms, tile.block_tokens)
    prefetch = choose_prefetch(gpu, shape, tile, len(lengths), mode, table)
    distance = distance_for(seen, shape.kv_heads, gpu.sms, tile, prefetch.distance)
    why = [
        f"tile {tile.block_tokens} tokens, {tile.stages} stages, {tile.warps} warps: "
        + (tile.measured or "from compiled registers, not measured"),
        f"{sum(splits)} splits x {shape.kv_heads} KV heads = {sum(splits) * shape.kv_heads} CTAs on {gpu.sms} SMs, "
        f"at most {split_tokens(sum(seen), shape.kv_heads, gpu.sms, tile.block_tokens)} tokens each",
        *prefetch.why,
    ]
    if prefetch.distance and not distance:
        why.append(f"prefetch off for these lengths: {min_tiles(tile)} tiles a split or fewer")
    final = Prefetch(prefetch.form, distance, prefetch.pdl, prefetch.why)
    return Plan(tile, splits, final, tuple(why))
