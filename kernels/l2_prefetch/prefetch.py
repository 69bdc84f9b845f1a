# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""L2 prefetch of one tile of K and V, as Triton device functions around inline PTX.

Two forms. ``line``: one ``prefetch.global.L2`` per 128-byte line and lane, for NHD rows (a row is a few
hundred bytes; bulk with per-lane addresses becomes a serial loop of 7 instructions per lane there).
``bulk``: one ``cp.async.bulk.prefetch.L2`` per (page, K or V), for HND pages, at 2 KiB and more a call.

Both are hints with no completion: they change no value, so prefetch on and off give the same bits.
Inline assembly runs once per *replicated* element, so every call works on a 1-D tensor of exactly
32 x num_warps lanes (one element per thread), predicated inside. The tests hold the layout.

Source: PTX ISA, "prefetch", "cp.async.bulk.prefetch" (size and address multiples of 16, no generic form).
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0)
LINE = tl.constexpr(1)
BULK = tl.constexpr(2)
LINE_BYTES = tl.constexpr(128)


@triton.jit
def pdl_wait():
    """Wait until the kernel before this one has finished and its writes are visible."""
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def pdl_launch_dependents():
    """Let the kernel after this one be scheduled; it still waits for our end before it reads."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def row_offset(
    entry, token, page_stride, token_stride, PAGE: tl.constexpr, PAGE_INDEX: tl.constexpr, HND: tl.constexpr
):
    """Elements from the pool's start to the row of ``token`` (its position) for KV head 0. int64."""
    if HND:
        page = entry if PAGE_INDEX else entry // PAGE
        row = token % PAGE if PAGE_INDEX else entry % PAGE
        return page.to(tl.int64) * page_stride + row * token_stride
    else:
        slot = entry * PAGE + token % PAGE if PAGE_INDEX else entry
        return slot.to(tl.int64) * token_stride


@triton.jit
def load_entry(entries, start, token, keep, PAGE: tl.constexpr, PAGE_INDEX: tl.constexpr):
    """Index entry of each token (a token slot, or a page number), -1 where ``keep`` is False."""
    if PAGE_INDEX:
        return tl.load(entries + start + token // PAGE, mask=keep, other=-1)
    else:
        return tl.load(entries + start + token, mask=keep, other=-1)


@triton.jit
def checked(entry, pool_slots, PAGE: tl.constexpr, PAGE_INDEX: tl.constexpr):
    """``entry`` as int32, -1 outside the pool. Half-width entries save a dozen registers in the loop."""
    limit = pool_slots // PAGE if PAGE_INDEX else pool_slots
    return tl.where((entry >= 0) & (entry < limit), entry, -1).to(tl.int32)


@triton.jit
def lane_token(N: tl.constexpr, PAGE: tl.constexpr, FORM: tl.constexpr, LANES: tl.constexpr):
    """What each lane prefetches of a tile: (first token in the tile, is it V, part of the row, lane has work)."""
    lane = tl.arange(0, LANES)
    if FORM == BULK:
        STEP: tl.constexpr = PAGE if PAGE < N else N
        PIECES: tl.constexpr = N // STEP
        return (lane % PIECES) * STEP, (lane // PIECES) == 1, lane * 0, lane < 2 * PIECES
    else:
        PER_ROW: tl.constexpr = LANES // (2 * N)
        row = lane // PER_ROW
        return row % N, row >= N, lane % PER_ROW, row < 2 * N


@triton.jit
def prefetch_tile(
    k, v, tile, token, is_v, part, entry, keep, low, length, head, pool_slots,
    k_page, k_token, k_head, v_page, v_token, v_head,
    N: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ITEMSIZE: tl.constexpr,
    PAGE_INDEX: tl.constexpr, HND: tl.constexpr, FORM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Prefetch what ``lane_token`` assigned of ``tile``. ``entry`` was loaded for these tokens, -1 for none.

    Tokens before ``low`` (the window's start), from ``length`` on, and slots outside the pool are masked off.
    """
    n = tile * N + token
    if FORM == BULK:
        n = tl.maximum(n, low)
    entry = checked(entry, pool_slots, PAGE, PAGE_INDEX)
    ok = keep & (n >= low) & (n < length) & (entry >= 0)
    k_at = k.to(tl.int64) + (row_offset(entry, n, k_page, k_token, PAGE, PAGE_INDEX, HND) + head * k_head) * ITEMSIZE
    v_at = v.to(tl.int64) + (row_offset(entry, n, v_page, v_token, PAGE, PAGE_INDEX, HND) + head * v_head) * ITEMSIZE
    address = tl.where(is_v, v_at, k_at)
    if FORM == BULK:
        STEP: tl.constexpr = PAGE if PAGE < N else N
        end = tl.minimum(tile * N + token + STEP, length)
        ok = ok & (n < end)
        size = ((end - n) * (D * ITEMSIZE)).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [address, ok.to(tl.int32), size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        LINES: tl.constexpr = (D * ITEMSIZE + LINE_BYTES - 1) // LINE_BYTES
        PER_ROW: tl.constexpr = LANES // (2 * N)
        PER_LANE: tl.constexpr = (LINES + PER_ROW - 1) // PER_ROW
        for i in tl.static_range(PER_LANE):
            line = part * PER_LANE + i
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
                "=r,l,r",
                [address + line * LINE_BYTES, (ok & (line < LINES)).to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
