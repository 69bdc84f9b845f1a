"""``decode_attention``: the public entry. Checks, launches, and falls back to one split when a launch fails."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from sglang_hicache_ext.kernels.l2_prefetch import kernel
from sglang_hicache_ext.kernels.l2_prefetch.check import (
    DecodeParams,
    KvIndex,
    check_call,
    check_entries,
    check_output,
    fail,
    pool_slots,
)
from sglang_hicache_ext.kernels.l2_prefetch.planner import Plan, Prefetch, Shape, make_plan
from sglang_hicache_ext.kernels.l2_prefetch.registers import ChosenLimits
from sglang_hicache_ext.kernels.l2_prefetch.schedule import Schedule, schedule_from_plan, single_split
from sglang_hicache_ext.kernels.l2_prefetch.tuning import Gpu, Tile, load_table

logger = logging.getLogger(__name__)

FORM_CODES = {"none": 0, "line": 1, "bulk": 2}
COMBINE_STEP = 16
LOG2E = 1.4426950408889634
UNKNOWN_GPU = Gpu("unknown", 0, 1, 0, 102400)

_limits = ChosenLimits()
_failed: set[tuple[Any, ...]] = set()
_failed_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of requests with more than one split; its content need not survive between calls.

    Attributes:
        partial: [items, query heads, head_dim] float32.
        partial_lse: [items, query heads] float32.
    """

    partial: torch.Tensor
    partial_lse: torch.Tensor


def alloc_workspace(items: int, query_heads: int, head_dim: int, device: torch.device | str) -> Workspace:
    """A workspace for schedules of up to ``items`` work items."""
    return Workspace(
        torch.empty(items, query_heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(items, query_heads, dtype=torch.float32, device=device),
    )


def device_gpu(device: torch.device) -> Gpu:
    """The planner's view of a torch device; a GPU that is not in the table has bandwidth 0."""
    if device.type != "cuda":
        return UNKNOWN_GPU
    props: Any = torch.cuda.get_device_properties(device)
    known = load_table().gpus.get(props.name)
    return Gpu(
        props.name,
        props.major * 10 + props.minor,
        props.multi_processor_count,
        getattr(props, "L2_cache_size", known.l2_bytes if known else 0),
        getattr(props, "shared_memory_per_multiprocessor", known.smem_per_sm if known else 102400),
        known.bandwidth if known else 0.0,
    )


def launch_failures() -> int:
    """Kinds of call that fell back to one split since the process started; 0 is what a benchmark wants."""
    return len(_failed)


def host_lengths(index: KvIndex, batch: int) -> list[int]:
    """Tokens of each request, copied to the host; synchronises."""
    if index.seq_lens is not None:
        return [int(n) for n in index.seq_lens[:batch].tolist()]
    ends = index.indptr[: batch + 1].tolist()
    return [b - a for a, b in pairwise(ends)]


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: KvIndex,
    params: DecodeParams,
    *,
    sinks: torch.Tensor | None = None,
    plan: Plan | None = None,
    schedule: Schedule | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    check_indices: bool = False,
) -> torch.Tensor:
    """Attention of one new token per request over its pages.

    Without ``plan`` the call plans on the host, which copies the lengths and synchronises. For a CUDA graph pass
    ``plan`` (tile, form), ``schedule`` (filled on the device), ``out`` and ``workspace``; nothing then synchronises.

    Args:
        q: [batch, query heads, head_dim] bf16 or fp16.
        k, v: pools, see ``DecodeParams.layout``; q's dtype, float8_e4m3fn or float8_e5m2.
        index: token slots or pages of each request.
        params: scales, window, soft cap, pool layout.
        sinks: [query heads] float, a logit per head that takes weight and has no value.
        out: [batch, query heads, head_dim] like q; any strides but the last.
        lse: [batch, query heads] float32, written when given: natural log of the softmax denominator, sink included.
        check_indices: copy the index to the host and check it against the pool; for debugging.

    Returns:
        ``out``, every row written: a request without tokens gives zeros. A slot outside the pool is not
        read; it makes its request's rows NaN.

    Raises:
        ConfigError: before any launch, with the shape or value and what is allowed.
    """
    shape = check_call(q, k, v, index, params, sinks)
    if check_indices:
        check_entries(k, index, params, q.shape[0])
    out = torch.empty_like(q) if out is None else out
    check_output(out, q, lse)
    if q.shape[0] == 0:
        return out
    if plan is None:
        plan = make_plan(device_gpu(q.device), shape, host_lengths(index, q.shape[0]))
    if schedule is None:
        schedule = schedule_from_plan(plan, q.device)
    _check_room(q, schedule, workspace)
    call = _Call(q, k, v, index, params, sinks, out, lse, shape)
    key = (plan.tile, plan.prefetch.form, plan.prefetch.pdl, shape, str(q.device))
    if key in _failed:
        return call.run_single_split(plan.tile)
    try:
        call.launch(plan.tile, plan.prefetch, schedule, workspace)
    except Exception as error:  # a refused launch leaves nothing behind; Triton raises many types
        with _failed_lock:
            _failed.add(key)
        logger.error("l2_prefetch: launch failed, using one split from now on for %s: %s", shape, error)
        call.run_single_split(plan.tile)
    return out


def _check_room(q: torch.Tensor, schedule: Schedule, workspace: Workspace | None) -> None:
    if schedule.batch < q.shape[0] or schedule.items < q.shape[0]:
        fail(f"schedule of {schedule.batch} requests, {schedule.items} items", f"q has {q.shape[0]} requests")
    need = (schedule.items, q.shape[1], q.shape[2])
    if workspace is not None:
        have = tuple(workspace.partial.shape)
        if have[0] < need[0] or have[1:] != need[1:] or not workspace.partial.is_contiguous():
            fail(f"workspace of {have}", f"pass a contiguous one of at least {need}")


@dataclass(frozen=True, slots=True)
class _Call:
    """One checked call; launches read it, nothing changes it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index: KvIndex
    params: DecodeParams
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    shape: Shape

    def run_single_split(self, tile: Tile) -> torch.Tensor:
        """The plainest launch: one split, one stage, no prefetch, no PDL, no combine."""
        plain = Tile("*", 0, tile.head_dim, tile.kv, 16, 1, 4, 255, 0)
        self.launch(plain, Prefetch("none", 0, False, ()), single_split(self.q.shape[0], self.q.device), None)
        return self.out

    def launch(self, tile: Tile, prefetch: Prefetch, schedule: Schedule, workspace: Workspace | None) -> None:
        batch, heads, dim = self.q.shape
        several = schedule.items > batch
        if workspace is None:
            workspace = alloc_workspace(schedule.items if several else 1, heads, dim, self.q.device)
        self._attend(tile, prefetch, schedule, workspace)
        if several:
            self._combine(prefetch, schedule, workspace)

    def _attend(self, tile: Tile, prefetch: Prefetch, schedule: Schedule, workspace: Workspace) -> None:
        args = attend_args(self, schedule, workspace)
        constants = attend_constants(self, tile, prefetch.form, prefetch.pdl)
        options = launch_options(self.q, tile.warps, tile.stages, prefetch.pdl)
        grid = (self.k.shape[1], schedule.items)

        def launch(limit: dict[str, int]) -> Any:
            return kernel.attend[grid](*args, **constants, **options, **limit)

        if self.q.is_cuda:
            key = (self.q.device, self.q.dtype, self.k.dtype, tile.warps, *constants.values())
            _limits.launch(key, tile, launch)
        else:
            launch({})

    def _combine(self, prefetch: Prefetch, schedule: Schedule, workspace: Workspace) -> None:
        batch, heads, dim = self.q.shape
        lse = self.out if self.lse is None else self.lse
        kernel.combine[(batch, heads)](
            self.out,
            lse,
            workspace.partial,
            workspace.partial_lse,
            schedule.split_indptr,
            self.out if self.sinks is None else self.sinks,
            self.params.v_scale,
            self.out.stride(0),
            self.out.stride(1),
            lse.stride(0),
            lse.stride(1),
            workspace.partial.stride(0),
            workspace.partial.stride(1),
            D=dim,
            STEP=COMBINE_STEP,
            SINKS=self.sinks is not None,
            WITH_LSE=self.lse is not None,
            PDL=prefetch.pdl,
            **launch_options(self.q, 4, 1, prefetch.pdl),
        )


def launch_options(q: torch.Tensor, warps: int, stages: int, pdl: bool) -> dict[str, Any]:
    """Triton launch options; PDL is a property of a launch on a GPU."""
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if q.is_cuda and pdl:
        options["launch_pdl"] = True
    return options


def attend_args(call: _Call, schedule: Schedule, workspace: Workspace) -> tuple[Any, ...]:
    """Runtime arguments of ``kernel.attend``, in order. Absent tensors are stood in for by ``out``, never read."""
    q, k, v, out, params, index = call.q, call.k, call.v, call.out, call.params, call.index
    lse = out if call.lse is None else call.lse
    token = 0 if params.layout == "NHD" else 2

    def page(pool: torch.Tensor) -> int:
        return pool.stride(0) * (params.page_tokens if params.layout == "NHD" else 1)

    return (
        q,
        k,
        v,
        out,
        lse,
        workspace.partial,
        workspace.partial_lse,
        index.indptr,
        index.entries,
        index.indptr if index.seq_lens is None else index.seq_lens,
        schedule.split_indptr,
        schedule.item_request,
        schedule.distance,
        out if call.sinks is None else call.sinks,
        params.sm_scale * params.k_scale * (1.0 if params.soft_cap else LOG2E),
        params.v_scale,
        q.shape[0],
        pool_slots(k, params),
        q.stride(0),
        q.stride(1),
        page(k),
        k.stride(token),
        k.stride(1),
        page(v),
        v.stride(token),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        workspace.partial.stride(0),
        workspace.partial.stride(1),
    )


def _usable_form(call: _Call, form: str) -> str:
    """Bulk needs whole pages of one head to be contiguous; otherwise lines."""
    if form != "bulk":
        return form
    whole = call.params.layout == "HND" and call.params.page_tokens >= 16
    rows = call.k.stride(-2) == call.v.stride(-2) == call.shape.head_dim
    return "bulk" if whole and rows else "line"


def attend_constants(call: _Call, tile: Tile, form: str, pdl: bool) -> dict[str, Any]:
    """Compile-time arguments of ``kernel.attend``."""
    params = call.params
    return {
        "GROUP": call.shape.group,
        "D": call.shape.head_dim,
        "N": tile.block_tokens,
        "PAGE": params.page_tokens,
        "ITEMSIZE": call.k.element_size(),
        "PAGE_INDEX": call.index.seq_lens is not None,
        "HND": params.layout == "HND",
        "WINDOW": params.window,
        "SOFT_CAP": params.soft_cap,
        "SINKS": call.sinks is not None,
        "WITH_LSE": call.lse is not None,
        "FORM": FORM_CODES[_usable_form(call, form)],
        "PDL": pdl,
        "LANES": 32 * tile.warps,
        "STAGES": tile.stages,
    }
