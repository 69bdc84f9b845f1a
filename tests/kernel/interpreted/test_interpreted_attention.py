"""The kernels under Triton's interpreter against the float64 reference, with every prefetched row recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import kernel_cases as cases
import pytest
import torch

from sglang_hicache_ext.kernels.l2_prefetch import attention
from sglang_hicache_ext.kernels.l2_prefetch.attention import decode_attention
from sglang_hicache_ext.kernels.l2_prefetch.check import KvIndex
from sglang_hicache_ext.kernels.l2_prefetch.planner import Plan, Prefetch
from sglang_hicache_ext.kernels.l2_prefetch.reference import reference, token_slots
from sglang_hicache_ext.kernels.l2_prefetch.schedule import schedule_from_counts
from sglang_hicache_ext.kernels.l2_prefetch.tuning import load_table

COVER = cases.covering_cases()
PLAIN = cases.Case(4, ("NHD", 1, "tokens"), 64, torch.float16, None, 0, 0.0, False, ("none", 0), False, False)


def with_(case: Any, **changes: Any) -> Any:
    return cases.Case(**{**vars(case), **changes})


def run(case: Any, t: Any, check_indices: bool = True) -> None:
    kv = "fp8" if case.kv else {torch.float16: "fp16", torch.bfloat16: "bf16"}[case.query]
    tile = load_table().tile("*", case.group, case.head_dim, kv)
    form, distance = case.prefetch
    plan = Plan(tile, case.splits, Prefetch(form, distance, case.pdl, ()), ())
    decode_attention(
        t.q,
        t.k,
        t.v,
        t.index,
        case.params,
        sinks=t.sinks,
        plan=plan,
        schedule=schedule_from_counts(case.splits, distance, "cpu"),
        out=t.out,
        lse=t.lse,
        check_indices=check_indices,
    )


@pytest.fixture(autouse=True)
def no_launch_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    failed: set[Any] = set()
    monkeypatch.setattr(attention, "_failed", failed)
    yield
    assert attention._failed is not failed or not failed, caplog.text


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Frobenius norm, after proving that every element was written."""
    assert not got.isnan().any()
    norm = want.norm()
    return float((got.double() - want).norm() / norm) if norm else float(got.double().norm())


def expected_rows(case: Any, t: Any) -> list[int]:
    """Address of every row of the pool that the call reads: K and V, each KV head, window applied."""
    out = []
    page, hnd = case.params.page_tokens, case.params.layout == "HND"
    for b, length in enumerate(case.lengths):
        slots = token_slots(t.index, b, page)
        for slot in slots[max(0, length - case.window) if case.window else 0 :]:
            for pool in (t.k, t.v):
                token = pool[slot // page, :, slot % page] if hnd else pool[slot]
                out += [token[h].data_ptr() for h in range(case.kv_heads)]
    return sorted(out)


def check(case: Any, recorder: Any, seed: int) -> None:
    t = cases.make_tensors(case, seed)
    run(case, t)
    want, want_lse = reference(t.q, t.k, t.v, t.index, case.params, t.sinks)
    assert error(t.out, want) < case.tolerance
    live = want_lse.isfinite()
    assert torch.equal(t.lse.isneginf(), ~live)
    assert float((t.lse[live].double() - want_lse[live]).abs().max() if live.any() else 0) < 20 * case.tolerance
    if case.strided:
        assert t.guards[:, [0, -1]].isnan().all() and t.guards[..., case.head_dim :].isnan().all()
    check_prefetch(case, t, recorder)


def check_prefetch(case: Any, t: Any, recorder: Any) -> None:
    """Prefetch on: every row exactly once, whole, aligned, nothing else. Off: nothing."""
    row_bytes = case.head_dim * t.k.element_size()
    rows = expected_rows(case, t) if case.prefetch[1] else []
    kinds = {e[0] for e in recorder.events if not isinstance(e, str)}
    if "bulk" in kinds:
        assert recorder.rows(row_bytes) == rows
    else:
        assert recorder.rows(row_bytes) == sorted(r + i for r in rows for i in range(0, max(row_bytes, 1), 128))
    for e in recorder.events:
        if not isinstance(e, str):
            assert (e[1] % 16 == 0).all() and (e[2] % 16 == 0).all() and (e[2] > 0).all()
    if case.prefetch[0] != "none":
        assert recorder.lanes <= {128}
        want = "bulk" if case.prefetch[0] == "bulk" and case.params.layout == "HND" else "line"
        assert not rows or kinds == {want}


@pytest.mark.parametrize("case", COVER, ids=[f"half{i % 2}-{i:03d}" for i in range(len(COVER))])
def test_output_lse_and_prefetched_rows_are_right(case: Any, recorder: Any) -> None:
    check(case, recorder, seed=case.group * 31 + sum(case.lengths))


@pytest.mark.parametrize("case", COVER[::29], ids=lambda case: f"half{case.group % 2}-{case.group}-{case.head_dim}")
def test_the_quick_interpreter_computes_the_bits_of_the_plain_one(
    case: Any, recorder: Any, quick: pytest.MonkeyPatch
) -> None:
    def bits() -> tuple[Any, ...]:
        recorder.events.clear()
        t = cases.make_tensors(case)
        run(case, t)
        return t.out.view(torch.int16), t.lse.view(torch.int32), len(recorder.rows(128))

    first = bits()
    quick.undo()
    plain = bits()
    assert torch.equal(first[0], plain[0]) and torch.equal(first[1], plain[1]) and first[2] == plain[2]


def test_the_sample_covers_every_length_split_count_and_pair() -> None:
    assert {n for c in COVER for n in c.lengths} == set(range(201))
    assert {n for c in COVER for n in c.splits} == set(range(1, 65))
    assert {(c.group, c.pool) for c in COVER} == {
        (g, p) for g in cases.DIMENSIONS["group"] for p in cases.DIMENSIONS["pool"]
    }


@pytest.mark.parametrize("splits", [1, 3, 64])
@pytest.mark.parametrize("sinks", [False, True])
def test_empty_and_one_token_requests_are_exact(splits: int, sinks: bool, recorder: Any) -> None:
    case = with_(PLAIN, lengths=(0, 1, 0), splits=(splits,) * 3, sinks=sinks, prefetch=("line", 2))
    check(case, recorder, seed=splits)
    t = cases.make_tensors(case)
    run(case, t)
    assert not t.out[0].any() and not t.out[2].any()


@pytest.mark.parametrize(
    ("pool", "form"), [(("NHD", 1, "tokens"), "line"), (("HND", 16, "pages"), "bulk"), (("HND", 64, "pages"), "bulk")]
)
@pytest.mark.parametrize("pdl", [False, True])
def test_prefetch_on_and_off_give_the_same_bits(pool: Any, form: str, pdl: bool, recorder: Any) -> None:
    case = with_(PLAIN, pool=pool, lengths=(200, 77), splits=(3, 1), query=torch.bfloat16, head_dim=128)
    results = []
    for prefetch in (("none", 0), (form, 0), (form, 1), (form, 4)):
        t = cases.make_tensors(case)
        run(with_(case, prefetch=prefetch, pdl=pdl), t)
        results.append((t.out, t.lse))
    assert all(torch.equal(o, results[0][0]) and torch.equal(s, results[0][1]) for o, s in results)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_twenty_repeats_give_the_same_bits(splits: int) -> None:
    case = with_(PLAIN, lengths=(90,), splits=(splits,))
    t = cases.make_tensors(case)
    run(case, t)
    first, first_lse = t.out.clone(), t.lse.clone()
    for _ in range(20):
        t.out.fill_(float("nan"))
        t.lse.fill_(float("nan"))
        run(case, t, check_indices=False)
        assert torch.equal(t.out, first) and torch.equal(t.lse, first_lse)


def test_the_first_tiles_are_prefetched_before_the_pdl_wait_and_the_rest_after(recorder: Any) -> None:
    case = with_(PLAIN, lengths=(64 * 3,), splits=(1,), prefetch=("line", 2), pdl=True)
    t = cases.make_tensors(case)
    run(case, t)
    wait = recorder.events.index("wait")
    before = sum(len(e[1]) for e in recorder.events[:wait])
    assert before == 2 * 64 * 2
    assert sum(len(e[1]) for e in recorder.events[wait:] if not isinstance(e, str)) == 64 * 2
    assert recorder.events[-1] == "launch_dependents"


@pytest.mark.parametrize("pool", [("NHD", 1, "tokens"), ("HND", 16, "pages")])
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_a_slot_outside_the_pool_is_not_touched_and_spoils_only_its_own_request(
    pool: Any, bad: int, recorder: Any
) -> None:
    form = "bulk" if pool[0] == "HND" else "line"
    case = with_(PLAIN, pool=pool, lengths=(70, 90), splits=(2, 2), prefetch=(form, 1), group=1)
    t = cases.make_tensors(case)
    good = t.index.entries.clone()
    at = 3
    spoiled = KvIndex(t.index.indptr, good.clone(), t.index.seq_lens)
    spoiled.entries[at] = bad
    t.index = spoiled
    run(case, t, check_indices=False)
    assert t.out[0].isnan().all() and not t.out[1].isnan().any()
    bounds = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in (t.k, t.v)]
    touched = recorder.rows(case.head_dim * 2)
    assert touched and all(any(lo <= a < hi for lo, hi in bounds) for a in touched)
    lost = 2 * (1 if pool[0] == "NHD" else 16)
    assert len(touched) == 2 * sum(case.lengths) - lost


def test_a_failed_launch_gives_the_single_split_result_and_one_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = with_(PLAIN, lengths=(130, 5), splits=(4, 1))
    t = cases.make_tensors(case)
    real = attention.kernel.attend
    launches: list[int] = []

    class Refusing:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                launches.append(grid[1])
                if grid[1] > 2:
                    raise RuntimeError("out of resource: shared memory")
                real[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(attention.kernel, "attend", Refusing())
    monkeypatch.setattr(attention, "_failed", set())
    with caplog.at_level(logging.ERROR):
        run(case, t)
        run(case, t)
    want, _ = reference(t.q, t.k, t.v, t.index, case.params)
    assert error(t.out, want) < case.tolerance
    assert launches == [5, 2, 2]
    assert len(caplog.records) == 1 and "shared memory" in caplog.text


def test_a_large_logit_and_a_very_negative_one_stay_finite(recorder: Any) -> None:
    case = with_(PLAIN, lengths=(100, 100), splits=(3, 1))
    t = cases.make_tensors(case)
    t.q[0] *= 200
    t.q[1] *= -200
    run(case, t)
    want, _ = reference(t.q, t.k, t.v, t.index, case.params)
    assert error(t.out, want) < case.tolerance


def check_all(recorder: Any, numbered: Iterable[tuple[int, Any]]) -> None:
    for seed, case in numbered:
        recorder.events.clear()
        try:
            check(case, recorder, seed)
        except AssertionError as failed:
            raise AssertionError(f"case {seed}: {case}") from failed


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(cases.FULL_PARTS), ids=lambda part: f"features{part:02d}")
def test_the_whole_product_of_features_is_right(recorder: Any, part: int) -> None:
    check_all(recorder, islice(enumerate(cases.full_cases()), part, None, cases.FULL_PARTS))


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("group", cases.DIMENSIONS["group"], ids=lambda group: f"lengths{group:02d}")
def test_every_length_with_every_split_count_is_right(recorder: Any, group: int) -> None:
    check_all(recorder, enumerate(cases.every_length_cases(group)))
