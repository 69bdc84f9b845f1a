# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Split-KV paged decode attention in Triton: ``attend`` works, ``combine`` merges the splits.

CTA = (KV head, work item); a work item is one split of one request, and all query heads of the group
share the K and V that it reads. Softmax is online in fp32 and base 2. Token slots outside the pool are
never dereferenced: they turn the row into NaN, so that a broken index is seen and no other request's data is.
"""

import triton
import triton.language as tl

from sglang_hicache_ext.kernels.l2_prefetch.prefetch import (
    checked,
    lane_token,
    load_entry,
    pdl_launch_dependents,
    pdl_wait,
    prefetch_tile,
    row_offset,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def finish(m, weight, acc, sink, v_scale, SINKS: tl.constexpr):
    """Normalise: (output [H, D], natural-log LSE [H]). No tokens and no sink: zeros and -inf. NaN stays NaN."""
    top = m
    total = weight
    if SINKS:
        top = tl.maximum(m, sink)
        base = tl.where(top == NEG_INF, 0.0, top)
        fade = tl.exp2(m - base)
        total = weight * fade + tl.exp2(sink - base)
        acc = acc * fade[:, None]
    safe = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, NEG_INF, (top + tl.log2(safe)) * LN2)
    return acc / safe[:, None] * v_scale, lse


@triton.jit
def attend(  # noqa: PLR0915 (a kernel cannot be cut without passing its registers on)
    q, k, v, out, lse, partial, partial_lse,
    indptr, entries, seq_lens, split_indptr, item_request, distance_at, sinks,
    scale, v_scale, batch, pool_slots,
    q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_row, out_head, lse_row, lse_head,
    part_item, part_head,
    GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, ITEMSIZE: tl.constexpr,
    PAGE_INDEX: tl.constexpr, HND: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr, WITH_LSE: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
    LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one request for one KV head. Grid: (KV heads, items); items beyond the schedule are -1.

    Strides are in elements. ``scale`` is sm_scale x k_scale, times log2(e) when there is no soft cap.
    ``partial`` [items, heads, D] holds normalised outputs, ``partial_lse`` [items, heads] their base-2 LSE;
    a request with one split is written straight to ``out``.
    """
    head = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1)
    b = tl.load(item_request + item).to(tl.int64)
    if (b < 0) | (b >= batch):
        return
    first = tl.load(split_indptr + b)
    splits = tl.load(split_indptr + b + 1) - first
    start = tl.load(indptr + b).to(tl.int64)
    length = tl.load(seq_lens + b).to(tl.int32) if PAGE_INDEX else (tl.load(indptr + b + 1) - start).to(tl.int32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    tile0 = low // N
    tiles = tl.maximum(tl.cdiv(length, N) - tile0, 0)
    begin = tile0 + tiles * (item - first) // splits
    end = tile0 + tiles * (item - first + 1) // splits
    q_heads = head * GROUP + tl.arange(0, 16)
    in_group = tl.arange(0, 16) < GROUP
    lse_at = partial_lse + item.to(tl.int64) * (part_item // D) + q_heads
    if (begin >= end) & (splits > 1):
        if PDL:
            pdl_wait()
            pdl_launch_dependents()
        tl.store(lse_at, tl.full([16], NEG_INF, tl.float32), mask=in_group)
        return

    if FORM != 0:
        token, is_v, part, has_work = lane_token(N, PAGE, FORM, LANES)
        distance = tl.maximum(tl.load(distance_at), 0)
        has_work = has_work & (token * 0 + distance > 0)  # a scalar condition would widen the interpreter's mask
        for ahead in tl.range(begin, tl.minimum(begin + distance, end), num_stages=1):
            n0 = ahead * N + token
            if FORM == 2:
                n0 = tl.maximum(n0, low)
            entry0 = load_entry(entries, start, n0, has_work & (n0 >= low) & (n0 < length), PAGE, PAGE_INDEX)
            prefetch_tile(
                k, v, ahead, token, is_v, part, entry0, has_work, low, length, head, pool_slots,
                k_page, k_token, k_head, v_page, v_token, v_head,
                N, D, PAGE, ITEMSIZE, PAGE_INDEX, HND, FORM, LANES,
            )  # fmt: skip
        limit = tl.minimum(length, end * N)
        n1 = (begin + distance) * N + token
        entry = load_entry(entries, start, n1, has_work & (n1 < limit), PAGE, PAGE_INDEX)
    if PDL:
        pdl_wait()

    d = tl.arange(0, D)
    query = tl.load(q + b * q_row + q_heads[:, None] * q_head + d[None, :], mask=in_group[:, None], other=0.0)
    m = tl.full([16], NEG_INF, tl.float32)
    weight = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        n = tile * N + tl.arange(0, N)
        keep = (n >= low) & (n < length)
        place = checked(load_entry(entries, start, n, keep, PAGE, PAGE_INDEX), pool_slots, PAGE, PAGE_INDEX)
        ok = place >= 0
        # what a score gets added: one number a token costs fewer registers than two masks in the layout of the scores
        bias = tl.where(ok, 0.0, tl.where(keep, float("nan"), NEG_INF))
        if FORM != 0:  # ahead of the first tile, so the window's start no longer cuts anything off
            prefetch_tile(
                k, v, tile + distance, token, is_v, part, entry, has_work, 0, limit, head, pool_slots,
                k_page, k_token, k_head, v_page, v_token, v_head,
                N, D, PAGE, ITEMSIZE, PAGE_INDEX, HND, FORM, LANES,
            )  # fmt: skip
            n1 = (tile + 1 + distance) * N + token
            entry = load_entry(entries, start, n1, has_work & (n1 < limit), PAGE, PAGE_INDEX)
        k_at = row_offset(place, n, k_page, k_token, PAGE, PAGE_INDEX, HND) + head * k_head
        v_at = row_offset(place, n, v_page, v_token, PAGE, PAGE_INDEX, HND) + head * v_head
        keys = tl.load(k + k_at[None, :] + d[:, None], mask=ok[None, :], other=0.0)
        s = tl.dot(query, keys.to(query.dtype)) * scale
        if SOFT_CAP > 0:
            s = (2 * tl.sigmoid(2 * s / SOFT_CAP) - 1) * (SOFT_CAP * LOG2E)
        s += bias[None, :]
        values = tl.load(v + v_at[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == NEG_INF, 0.0, top)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(m - base)
        weight = weight * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(query.dtype), values.to(query.dtype))
        m = top
    if PDL:
        pdl_launch_dependents()

    if splits == 1:
        sink = tl.zeros([16], tl.float32)
        if SINKS:
            sink = tl.load(sinks + q_heads, mask=in_group, other=0.0).to(tl.float32) * LOG2E
        result, row_lse = finish(m, weight, acc, sink, v_scale, SINKS)
        at = out + b * out_row + q_heads[:, None] * out_head + d[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=in_group[:, None])
        if WITH_LSE:
            tl.store(lse + b * lse_row + q_heads * lse_head, row_lse, mask=in_group)
    else:
        safe = tl.where(weight == 0.0, 1.0, weight)
        row = item.to(tl.int64) * part_item + q_heads * part_head
        tl.store(partial + row[:, None] + d[None, :], acc / safe[:, None], mask=in_group[:, None])
        lse2 = tl.where(weight == 0.0, NEG_INF, m + tl.log2(safe))
        tl.store(lse_at, lse2, mask=in_group)


@triton.jit
def combine(
    out, lse, partial, partial_lse, split_indptr, sinks, v_scale,
    out_row, out_head, lse_row, lse_head, part_item, part_head,
    D: tl.constexpr, STEP: tl.constexpr, SINKS: tl.constexpr, WITH_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one (request, query head), STEP at a time. Grid: (batch, query heads)."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    first = tl.load(split_indptr + b)
    splits = tl.load(split_indptr + b + 1) - first
    if splits <= 1:
        return
    if PDL:
        pdl_wait()
    d = tl.arange(0, D)
    m = tl.full([1], NEG_INF, tl.float32)
    weight = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, D], tl.float32)
    for s0 in range(0, splits, STEP):
        s = s0 + tl.arange(0, STEP)
        row = (first + s).to(tl.int64)
        part_lse = tl.load(partial_lse + row * (part_item // D) + h, mask=s < splits, other=NEG_INF)
        live = part_lse != NEG_INF
        values = tl.load(partial + row[:, None] * part_item + h * part_head + d[None, :], mask=live[:, None], other=0.0)
        top = tl.maximum(m, tl.max(part_lse, 0))
        base = tl.where(top == NEG_INF, 0.0, top)
        w = tl.exp2(part_lse - base)
        fade = tl.exp2(m - base)
        weight = weight * fade + tl.sum(w, 0)
        acc = acc * fade[:, None] + tl.sum(values * w[:, None], 0)[None, :]
        m = top
    sink = tl.zeros([1], tl.float32)
    if SINKS:
        sink = sink + tl.load(sinks + h).to(tl.float32) * LOG2E
    result, row_lse = finish(m, weight, acc, sink, v_scale, SINKS)
    at = out + b * out_row + h * out_head + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty))
    if WITH_LSE:
        tl.store(lse + b * lse_row + h * lse_head + tl.arange(0, 1), row_lse)
