"""One real SGLang engine for compare_policies.py.

python engine_child.py ENGINE_ARGUMENTS_JSON    reads one step (JSON) a line, answers with one line each; ends at end of input

Steps: {"measure": [[seed, tokens], ...]}, {"write": [[seed, tokens], ...], "pages": n}, {"control": {...}, "replay": [...]}.
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


def flush(engine: Any) -> None:
    """Empty GPU and host; our pipeline starts anew under the policy of the control file. Refused while I/O drains."""
    deadline = time.monotonic() + SETTLE_S
    while not engine.flush_cache().success:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cache could not be flushed within {SETTLE_S:.0f} s")
        time.sleep(0.2)


def run_step(engine: Any, step: dict[str, Any], control: Path) -> dict[str, Any]:
    """Do one step; its answer."""
    run = engine.loop.run_until_complete
    if "measure" in step:
        return {"measured": [[n, run(answer(engine, prompt_ids(seed, n)))["ttft_s"]] for seed, n in step["measure"]]}
    if "write" in step:
        for seed, tokens in step["write"]:
            run(answer(engine, prompt_ids(seed, tokens)))
        return {"written": wait_written(engine, step["pages"])["moved"].get("write_pages", 0)}
    control.write_text(json.dumps(step["control"]))
    flush(engine)
    return {"answers": run(replay(engine, step["replay"]))}


def main() -> None:
    control = Path(sys.argv[2])
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    try:
        for seed in (1, 2):  # the first forward and the first page hash pay for set-up
            engine.loop.run_until_complete(answer(engine, prompt_ids(10_000_019 * seed, 600)))
        say(up=True)
        for line in sys.stdin:
            say(**run_step(engine, json.loads(line), control))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
