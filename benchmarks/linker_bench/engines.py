"""TTFT of the direct linker and of the `nvme` storage backend: two real servers, the same prompts, the same drive.

Both stay up; before each prompt the caches on the device and in host memory are dropped, so that it comes from the drive
(both read with O_DIRECT). One server works at a time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cold_start_bench.client import Answer, Client
from cold_start_bench.servers import ADMIN_KEY, engine_kit
from harness import Measurement, Trial, WarmRead, WrongBytes

SETTLE_S = 60.0


def arguments(name: str, model: str, folder: Path, tokens: int, device: str) -> dict[str, Any]:
    """Of the server of one arm: "linker" or "nvme". Both fit on one GPU."""
    kit = engine_kit()
    store = {"path": str(folder / "store"), "capacity": "2GiB"}
    if name == "linker":
        more = kit.linker_arguments(store)
    else:
        more = kit.storage_arguments("nvme", "page_first_direct", {**store, "prefetch_threshold": 64})
    if device != "cpu":
        more["mem_fraction_static"] = 0.4
    size = {"max_total_tokens": 4 * tokens, "context_length": tokens + 256}
    made: dict[str, Any] = kit.engine_arguments(model, device=device, **size, **more)
    return made


class Served:
    """One server with its prompts stored; a context manager.

    Attributes:
        expected: tokens computed for each prompt when it was stored.
        different: answers that had other tokens than those; on the CPU they are refused.
    """

    def __init__(self, name: str, model: str, kind: str, folder: Path, tokens: int, device: str = "cpu") -> None:
        self.name, self._tokens = name, tokens
        folder.mkdir(parents=True, exist_ok=True)
        kit = engine_kit()
        more = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        self._server = kit.Server(
            arguments(name, model, folder, tokens, device), kind, folder / "server.log", admin_key=ADMIN_KEY, **more
        )
        self._server.__enter__()
        self._client = Client(f"http://127.0.0.1:{self._server.port}", ADMIN_KEY)
        self.expected: list[tuple[int, ...]] = []
        self.different, self._is_exact = 0, device == "cpu"

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)

    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute every prompt once and wait until its pages are stored."""
        self._client.generate([5] * 200, 2)
        self.expected = [self._ask(p).output for p in prompts]
        wanted = sum(len(p) // 64 for p in prompts)
        deadline = time.monotonic() + SETTLE_S
        while self.state()["moved"].get("write_pages", 0) < wanted and time.monotonic() < deadline:
            time.sleep(0.2)

    def _ask(self, prompt: Sequence[int]) -> Answer:
        answer = self._client.generate(prompt, 4)
        if answer.error:
            raise RuntimeError(f"{self.name}: {answer.error}")
        return answer

    def once(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Each prompt once, from the drive; TTFT of each in milliseconds.

        A GPU rounds a suffix otherwise than a whole prompt, so that a near tie of a random model may turn out otherwise.
        """
        times = []
        for number, prompt in enumerate(prompts):
            self._server.control("POST", "/flush_cache")
            answer = self._ask(prompt)
            self.different += answer.output != self.expected[number]
            if self.different and self._is_exact:
                raise WrongBytes(f"{self.name}: other tokens for prompt {number}")
            loaded = answer.tokens_from("storage") + answer.tokens_from("host")
            if loaded < (len(prompt) - 1) // 64 * 64:
                raise WarmRead(
                    f"{self.name}: only {loaded} of {len(prompt)} tokens came from the drive: {answer.cached}"
                )
            times.append(1000 * answer.ttft_s)
        return times

    def run(self, trial: Trial, prompts: Sequence[Sequence[int]]) -> Measurement:
        """``once`` as an arm of the harness."""
        times = self.once(prompts)
        return Measurement({"ttft_ms": statistics.median(times)}, {"ttft_ms_each": times}, {})

    def state(self) -> dict[str, Any]:
        info = self._client.server_info()
        return dict((info["internal_states"] or [{}])[0].get("hicache_ext") or {"moved": {}})


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` tokens and one more, so that the last page is whole."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(tokens + 1)] for _ in range(count)]
