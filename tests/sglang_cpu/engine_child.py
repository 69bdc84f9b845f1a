"""One run of a real SGLang engine for the cold start demonstration; `cold_start.py` starts it.

python cold_start_engine.py JSON     prints one JSON object a line: up, answer (one a prompt), state, done
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

SETTLE_S = 30.0
"""Seconds to wait at most for the last backup to reach storage."""


def say(**line: Any) -> None:
    print("HCX " + json.dumps(line), flush=True)


def prompt_ids(index: int, tokens: int) -> list[int]:
    """The same prompt in every run."""
    generator = random.Random(index)
    return [generator.randrange(3, 259) for _ in range(tokens)]


def answer(engine: Any, ids: list[int], new_tokens: int) -> dict[str, Any]:
    """Generate greedily; returns output ids, TTFT in seconds, and where the prefix came from."""
    started = time.perf_counter()
    first = 0.0
    last: dict[str, Any] = {}
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    for part in engine.generate(input_ids=ids, sampling_params=sampling, stream=True):
        first = first or time.perf_counter() - started
        last = part
    meta = last["meta_info"]
    return {
        "out": last.get("output_ids"),
        "ttft_s": round(first, 4),
        "prompt_tokens": meta["prompt_tokens"],
        "from": meta.get("cached_tokens_details") or {},
    }


def our_state(engine: Any) -> dict[str, Any]:
    states = engine.get_server_info()["internal_states"]
    return dict(states[0].get("hicache_ext") or {}) if states else {}


def settled_state(engine: Any, pages: int) -> dict[str, Any]:
    """The backend's state once ``pages`` pages were written, or once nothing changed any more."""
    deadline = time.monotonic() + SETTLE_S
    state = our_state(engine)
    while state and state["moved"].get("write_pages", 0) < pages and time.monotonic() < deadline:
        time.sleep(0.2)
        state = our_state(engine)
    return state


def main() -> None:
    job = json.loads(sys.argv[1])
    started = time.perf_counter()
    import sglang

    engine = sglang.Engine(**job["engine"])
    say(up=round(time.perf_counter() - started, 1))
    try:
        answer(engine, prompt_ids(-1, 40), 2)  # the first forward pays for set-up
        for index in range(job["prompts"]):
            say(answer=answer(engine, prompt_ids(index, job["tokens"]), job["new_tokens"]))
        say(state=settled_state(engine, job["expect_written_pages"]))
    finally:
        engine.shutdown()
    say(done=round(time.perf_counter() - started, 1))


if __name__ == "__main__":
    main()
