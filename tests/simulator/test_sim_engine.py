"""The node: hand-computed times, brute force, conservation, and what the policies promise."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from simulator.engine import simulate
from simulator.infinite import simulated_hit_rate
from simulator.loads import MultiTurn, SharedPrompt
from simulator.results import RunColumns
from simulator.spec import NodeSpec
from simulator.trace import Load, Request, hit_rate_infinite

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.policy import PolicyName
from sglang_hicache_ext.testing.latency import Constant, HeavyTail, LatencyModel, SharedBandwidth, Stall

POLICIES = [str(p) for p in PolicyName]
QUICK = NodeSpec(
    prefill_tokens_per_s=1000.0,
    prefill_overhead_s=0.0,
    kv_bytes_per_token=10,
    l1_tokens=64,
    l2_tokens=10_000,
    l3_read_Bps=100_000.0,
    l3_write_Bps=1e9,
    load_back_Bps=1e12,
    query_s=0.0,
    first_batch_tokens=100,
    batch_tokens=100,
    io_workers=1,
    threshold_tokens=10,
    poll_s=0.001,
)


def one(tokens: int, stored: int, at: float = 0.0) -> Load:
    pages = tuple(range(-(-tokens // 10)))
    return Load("one", 10, (Request(at, tokens, 0, pages),), pages[: stored // 10])


def test_waiting_for_everything_takes_fetch_plus_the_rest_of_prefill() -> None:
    # Ten batches of 100 tokens: 0.05 s to the first byte and 0.01 s of transfer each; then 100 tokens of prefill.
    columns = simulate(one(1100, 1000), QUICK, Constant(base_s=0.05), "wait_complete")
    assert columns.ttft_s[0] == pytest.approx(0.6 + 0.1, abs=0.003)
    assert columns.storage_tokens_used == 1000
    assert columns.tokens_thrown_away == 0


def test_best_effort_on_an_idle_server_computes_everything() -> None:
    columns = simulate(one(1100, 1000), QUICK, Constant(base_s=0.05), "best_effort")
    assert columns.ttft_s[0] == pytest.approx(1.1, abs=0.003)
    assert columns.recomputed_gpu_s == pytest.approx(1.0)
    assert columns.storage_tokens_used == 0


def test_timeout_ends_at_sglangs_budget_and_uses_what_came() -> None:
    # Budget: 1 s + 1100 tokens x 0.25 s/Ki = 1.2686 s; batches end every 0.41 s, so three of them count.
    columns = simulate(one(1100, 1000), QUICK, Constant(base_s=0.4), "timeout")
    assert columns.ttft_s[0] == pytest.approx(1.0 + 1100 / 1024 * 0.25 + 0.8, abs=0.03)
    assert columns.storage_tokens_used == 300
    assert columns.tokens_thrown_away == 100  # the batch in flight at the end


def test_deadline_never_waits_longer_than_recomputing() -> None:
    columns = simulate(one(1100, 1000), QUICK, Constant(base_s=60.0), "deadline")
    assert columns.ttft_s[0] <= 1.0 + 1.1 + 0.05
    waiting = simulate(one(1100, 1000), QUICK, Constant(base_s=60.0), "wait_complete")
    assert waiting.ttft_s[0] > 50


def test_below_break_even_l3_is_slower_than_recomputing_under_wait_complete() -> None:
    slow = replace(QUICK, l3_read_Bps=0.4 * QUICK.break_even_Bps)
    load = SharedPrompt(requests=25, rate_per_s=0.02).load()
    without = simulate(load, replace(slow, threshold_tokens=1 << 40), Constant(), "best_effort")
    waiting = simulate(load, replace(slow, l2_tokens=1 << 20), Constant(), "wait_complete")
    deciding = simulate(load, replace(slow, l2_tokens=1 << 20), Constant(), "deadline")
    assert np.mean(list(waiting.ttft_s.values())) > 1.2 * np.mean(list(without.ttft_s.values()))
    assert np.mean(list(deciding.ttft_s.values())) < np.mean(list(waiting.ttft_s.values()))


def random_load(seed: int) -> Load:
    rng = random.Random(seed)
    known: list[tuple[int, ...]] = [()]
    requests, fresh = [], iter(range(1, 10**6))
    for i in range(60):
        base = rng.choice(known)
        pages = base[: rng.randint(0, len(base))] + tuple(next(fresh) for _ in range(rng.randint(1, 6)))
        known.append(pages)
        requests.append(Request(i * 0.02, len(pages) * 10 - rng.randint(0, 9), 0, pages))
    return Load("random", 10, tuple(requests))


@pytest.mark.parametrize("seed", range(5))
def test_the_hit_rate_of_a_small_load_equals_brute_force(seed: int) -> None:
    load = random_load(seed)
    hits = total = 0
    for i, request in enumerate(load.requests):
        earlier = [r.pages for r in load.requests[:i]]
        hits += max(
            (
                next(
                    (n for n, (a, b) in enumerate(zip(request.pages, p, strict=False)) if a != b),
                    min(len(p), len(request.pages)),
                )
                for p in earlier
            ),
            default=0,
        )
        total += len(request.pages)
    assert hit_rate_infinite(load.requests) == pytest.approx(hits / total)
    assert simulated_hit_rate(load) == pytest.approx(hits / total)


MODELS: list[LatencyModel] = [Constant(), HeavyTail(base_s=0.2), Stall(), SharedBandwidth()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: str(m.kind))
def test_every_request_ends_and_every_loaded_token_is_used_or_thrown_away(policy: str, model: LatencyModel) -> None:
    node = replace(QUICK, l1_tokens=40, l2_tokens=300, io_workers=2, host_share=0.5)
    load = random_load(9)
    columns = simulate(load, node, model, policy)
    assert sorted(columns.ttft_s) == list(range(len(load.requests)))
    assert min(columns.ttft_s.values()) > 0
    assert columns.storage_tokens_used + columns.tokens_thrown_away <= columns.storage_hit_tokens
    assert columns.input_tokens == load.input_tokens


def test_the_same_seed_gives_the_same_run() -> None:
    runs: list[RunColumns] = [simulate(random_load(2), QUICK, HeavyTail(seed=7), "deadline") for _ in range(2)]
    assert runs[0].ttft_s == runs[1].ttft_s


@pytest.mark.parametrize("model", [Constant(), HeavyTail(), Stall()], ids=lambda m: str(m.kind))
@pytest.mark.slow
def test_deadline_is_close_to_the_best_policy_and_far_from_the_worst_tail(model: LatencyModel) -> None:
    load = MultiTurn(sessions=120).load()
    runs = {p: simulate(load, NodeSpec(), model, p) for p in POLICIES}
    best = min(c.ttft(50) for p, c in runs.items() if p != "deadline")
    assert runs["deadline"].ttft(50) <= 1.05 * best
    assert runs["deadline"].ttft(99) <= runs["wait_complete"].ttft(99) * 1.01


def test_sglangs_order_lets_a_long_request_delay_a_short_one() -> None:
    long, short = tuple(range(200)), tuple(range(1000, 1012))
    load = Load("two", 10, (Request(0.0, 2010, 0, (*long, -1)), Request(0.001, 130, 0, (*short, -2))), long + short)
    node = replace(QUICK, io_workers=1)
    fair = simulate(load, node, Constant(base_s=0.05), "wait_complete")
    in_turn = simulate(load, replace(node, is_fair=False), Constant(base_s=0.05), "wait_complete")
    assert fair.ttft_s[1] < 0.5 * in_turn.ttft_s[1]


def test_a_node_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="l3_read_Bps"):
        NodeSpec(l3_read_Bps=0)
    with pytest.raises(ConfigError, match="prefill_tokens_per_s"):
        NodeSpec(prefill_tokens_per_s=float("nan"))
