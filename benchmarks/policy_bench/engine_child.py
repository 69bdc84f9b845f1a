"""One real SGLang engine for compare_policies.py: python engine_child.py JSON; prints one JSON object a line.

Steps of a job, each optional: ``measure`` (recompute times), ``write`` (fill the store), ``replays`` (timed requests).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTLE_S = 60.0


def say(**line: Any) -> None:
    print("HCX " + json.dumps(line), flush=True)


def prompt_ids(seed: int, tokens: int) -> list[int]:
    """The same prompt in every process."""
    generator = random.Random(seed)
    return [generator.randrange(3, 259) for _ in range(tokens)]


async def answer(engine: Any, ids: list[int], wait_s: float = 0.0) -> dict[str, Any]:
    """Wait, send one prompt, return TTFT in seconds and the tokens that came from storage."""
    await asyncio.sleep(wait_s)
    started, first, meta = time.perf_counter(), 0.0, {}
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    async for part in await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
        first = first or time.perf_counter() - started
        meta = part["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return {"ttft_s": first, "storage_tokens": details.get("storage", 0), "cached_tokens": meta.get("cached_tokens", 0)}


async def replay(engine: Any, requests: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Send (arrival seconds, prompt seed, tokens) at their times; a failure is an answer with an error."""
    sent = [answer(engine, prompt_ids(seed, tokens), arrival) for arrival, seed, tokens in requests]
    got = await asyncio.gather(*sent, return_exceptions=True)
    return [{"error": repr(g)} if isinstance(g, BaseException) else g for g in got]


def state(engine: Any) -> dict[str, Any]:
    states = engine.get_server_info()["internal_states"]
    return dict(states[0].get("hicache_ext") or {}) if states else {}


def wait_written(engine: Any, pages: int) -> dict[str, Any]:
    deadline = time.monotonic() + SETTLE_S
    while (state(engine).get("moved") or {}).get("write_pages", 0) < pages and time.monotonic() < deadline:
        time.sleep(0.2)
    return state(engine)


def run_steps(engine: Any, job: dict[str, Any]) -> None:
    run = engine.loop.run_until_complete
    run(answer(engine, prompt_ids(10_000_019, 64)))  # the first forward pays for set-up
    for seed, tokens in job.get("measure", ()):
        say(measured=[tokens, run(answer(engine, prompt_ids(seed, tokens)))["ttft_s"]])
    if job.get("write"):
        for seed, tokens in job["write"]:
            run(answer(engine, prompt_ids(seed, tokens)))
        say(written=wait_written(engine, job["expect_pages"])["moved"].get("write_pages", 0))
    for step in job.get("replays", ()):
        Path(job["control"]).write_text(json.dumps(step["control"]))
        engine.flush_cache()
        say(replayed=step["name"], answers=run(replay(engine, step["requests"])))
    say(state=state(engine))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import sglang

    engine = sglang.Engine(**job["engine"])
    try:
        run_steps(engine, job)
    finally:
        engine.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
