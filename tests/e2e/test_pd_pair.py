"""A real prefill server and a real decode server with our transfer backend: the tokens of one server, whatever happens."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

SMALL_GROUPS = {"HICACHE_EXT_PD": json.dumps({"pd_group": "32KiB", "pd_layered_min": "64KiB", "pd_ucx": "TLS=tcp"})}
NEW_TOKENS = 8


def prompt(seed: int, tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 259) for _ in range(tokens)]


def state(pair: Any, role: str) -> Any:
    return pair.state(role)["hicache_ext_pd"]


def until(what: Any, limit_s: float = 30.0) -> bool:
    """Poll ``what`` until it is true."""
    deadline = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def one_server(model: str, kind: str, folder: Path, **arguments: Any) -> Iterator[Any]:
    import engine_kit
    import pd_kit

    server = engine_kit.Server(pd_kit.base_arguments(model, **arguments), kind, folder / "one.log")
    with server as up:
        yield up


def expected(server: Any, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    return [server.generate(ids, new_tokens)["out"] for ids in prompts]


def outs(answers: list[Any]) -> list[Any]:
    return [a.get("out") if "error" not in a else a for a in answers]


def test_the_pair_gives_the_tokens_of_one_server(models_dir: Any, tmp_path: Path) -> None:
    """Short and long, cold and cached, equal prompts at once, chunks, an abort; layer groups in every eager forward."""
    import pd_kit

    model = models_dir("tiny")
    prompts = [prompt(n, n) for n in (5, 16, 40, 333, 700, 1500)]
    with one_server(model, "tiny", tmp_path) as server:
        wanted = expected(server, prompts)
    with pd_kit.Pair(model, "tiny", tmp_path, env={"both": SMALL_GROUPS}) as pair:
        assert outs(pair.generate_all(prompts)) == wanted
        assert outs(pair.generate_all(prompts, workers=1)) == wanted  # now with cached prefixes
        fresh = prompt(99, 600)
        assert len({tuple(o) for o in outs(pair.generate_all([fresh] * 4))}) == 1
        pair.abort(_generate_in_background(pair, prompt(7, 1200), 400))
        assert outs(pair.generate_all(prompts)) == wanted
        prefill, decode = state(pair, "prefill"), state(pair, "decode")
        assert prefill["layered_forwards"] > 0
        assert prefill["hidden_forwards"] == 0
        assert prefill["counters"]["pd_chunks_layered"] > 0
        assert until(lambda: state(pair, "decode")["quarantined_pages"] == 0)
        assert decode["counters"].get("pd_errors", 0) == prefill["counters"].get("pd_errors", 0) == 0
        assert until(lambda: state(pair, "prefill")["rooms"] == 0)


def _generate_in_background(pair: Any, ids: list[int], new_tokens: int) -> str:
    """Start a long request; returns its id once the decode server works on it."""
    rid = f"request-{random.getrandbits(32)}"
    threading.Thread(target=pair.generate, args=(ids, new_tokens), kwargs={"rid": rid}, daemon=True).start()
    time.sleep(0.5)
    return rid


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("tiny", {"disable_overlap_schedule": False}), ("mla", {}), ("swa", {})],
    ids=["tiny-overlap", "mla", "swa"],
)
def test_two_hundred_requests_of_random_length_with_aborts(
    models_dir: Any, tmp_path: Path, kind: str, arguments: dict[str, Any]
) -> None:
    """In float32: in bfloat16 another batch or chunk rounds otherwise, and a random model's next token is a near thing."""
    import pd_kit

    arguments = {"dtype": "float32", **arguments}
    model, numbers = models_dir(kind), random.Random(3)
    shared = prompt(1, 256)
    prompts = [
        (shared[: 16 * numbers.randrange(0, 16)] if numbers.random() < 0.5 else [])
        + prompt(i, numbers.randrange(1, 900))
        for i in range(200)
    ]
    with one_server(model, kind, tmp_path, **arguments) as server:
        wanted = expected(server, prompts)
    with pd_kit.Pair(model, kind, tmp_path, env={"both": SMALL_GROUPS}, **arguments) as pair:
        answers = _with_aborts(pair, prompts, numbers)
        wrong = [i for i, (a, w) in enumerate(zip(answers, wanted, strict=True)) if "error" not in a and a["out"] != w]
        failed = [a for a in answers if "error" in a and not _was_aborted(a)]
        assert wrong == []
        assert failed == []
        assert sum("error" not in a for a in answers) > 150
        assert until(lambda: state(pair, "decode")["quarantined_pages"] == 0)
        assert outs(pair.generate_all(prompts[:8])) == wanted[:8]
        assert until(lambda: state(pair, "prefill")["rooms"] == 0)


def _was_aborted(answer: Any) -> bool:
    return "bort" in answer["message"]


def _with_aborts(pair: Any, prompts: list[list[int]], numbers: random.Random) -> list[Any]:
    """All prompts, four at a time; every tenth is aborted on both sides at a random moment."""
    import concurrent.futures

    moments = [numbers.uniform(0.0, 0.3) if i % 10 == 9 else None for i in range(len(prompts))]

    def one(index: int) -> Any:
        rid, moment = f"r{index}", moments[index]
        if moment is not None:
            timer = threading.Timer(moment, pair.abort, [rid])
            timer.start()
        return pair.generate(prompts[index], NEW_TOKENS, rid=rid)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(len(prompts))))


def test_a_killed_side_costs_its_requests_and_nothing_else(models_dir: Any, tmp_path: Path) -> None:
    """Either scheduler is killed in the middle of transfers: the other ends the requests, gives its memory back, goes on."""
    import pd_kit

    model, ids = models_dir("tiny"), prompt(5, 900)
    with pd_kit.Pair(model, "tiny", tmp_path, env={"both": SMALL_GROUPS}) as pair:
        wanted = pair.generate(ids)["out"]
        for victim in pd_kit.ROLES:
            other = next(r for r in pd_kit.ROLES if r != victim)
            found = _while_busy(pair, lambda victim=victim: pair.signal_scheduler(victim, signal.SIGKILL))
            assert any("error" in a or "error" in a["prefill"] for a in found), "nothing was under way"
            pair.stop(victim)
            assert until(lambda other=other: _is_idle(pair, other), 60), state(pair, other)
            pair.start(victim)
            assert until(lambda: pair.generate(prompt(6, 50)).get("out") is not None, 60)
            assert pair.generate(ids)["out"] == wanted


def _while_busy(pair: Any, act: Any) -> list[Any]:
    """Eight long requests; ``act`` while they are under way. Their answers, errors included."""
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(pair.generate, prompt(1000 + i, 1500), 64, limit_s=90) for i in range(8)]
        time.sleep(0.4)
        act()
        return [r.result() for r in running]


def _is_idle(pair: Any, role: str) -> bool:
    found = state(pair, role)
    return bool(found.get("quarantined_pages", 0) == 0 and found.get("rooms", 0) == 0)


def test_a_stopped_prefill_never_writes_into_pages_used_again(models_dir: Any, tmp_path: Path) -> None:
    """SIGSTOP until the decode side has given up, then SIGCONT: the pages are held until prefill has said it is through."""
    import pd_kit

    model, ids = models_dir("tiny"), prompt(5, 1400)
    short = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "4", "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1000"}
    with pd_kit.Pair(model, "tiny", tmp_path, env={"both": SMALL_GROUPS, "decode": short}) as pair:
        wanted = pair.generate(ids)["out"]
        held = [_stop_in_the_middle(pair, attempt) for attempt in range(4)]
        assert max(held) > 0, "prefill was never stopped in the middle of a transfer"
        assert until(lambda: _is_idle(pair, "decode"))
        assert pair.generate(ids)["out"] == wanted


def _stop_in_the_middle(pair: Any, attempt: int) -> int:
    """Stop prefill while two requests are under way; pages held once the decode side has given up on them."""
    answers: list[Any] = []

    def ask(seed: int) -> None:
        answers.append(pair.generate(prompt(seed, 1400), limit_s=60))

    asked = [threading.Thread(target=ask, args=(100 * attempt + i,)) for i in range(2)]
    for each in asked:
        each.start()
    time.sleep(0.1 + 0.05 * attempt)
    with pair.stopped("prefill"):
        until(lambda: state(pair, "decode")["quarantined_pages"] > 0, 8)
        held = int(state(pair, "decode")["quarantined_pages"])
    for each in asked:
        each.join(60)
    return held
