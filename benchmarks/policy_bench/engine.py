"""A real SGLang engine on the CPU over our NVMe store, slowed; in a process of its own, one step at a time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import BadInput

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "tests" / "sglang_cpu"
PAGE_TOKENS = 16
LENGTHS = (513, 1025, 1537)
"""Prompt lengths: whole pages and one token, because the last token is always computed."""
STEP_LIMIT_S = 300.0
FULL_SPEED = {
    "model": {"kind": "constant", "base_s": 0.0},
    "bandwidth_Bps": 0.0,
    "config": {"prefetch_policy": "best_effort"},
}
KV_BYTES_PER_TOKEN = 2 * 4 * 2 * 64 * 4
"""K and V, layers, heads, head size, bytes of the model "tiny" in float32: CPUs without bfloat16 units compute it faster."""


class EngineEnded(Exception):
    """The engine ended, or did not answer in time; the end of its log is in the message."""


@dataclass(slots=True)
class Bench:
    """Paths and requests of the real run."""

    directory: Path
    seed: int
    requests: int
    prompts: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.prompts = [(self.seed * 100_003 + i, rng.choice(LENGTHS)) for i in range(self.requests)]

    def arrivals(self, gap_s: float) -> list[tuple[float, int, int]]:
        rng, now, made = random.Random(self.seed + 1), 0.0, []
        for seed, tokens in self.prompts:
            made.append((now, seed, tokens))
            now += rng.expovariate(1 / gap_s)
        return made


class Engine:
    """A context manager; ``step`` sends one step of engine_child.py and waits for its answer."""

    def __init__(self, bench: Bench) -> None:
        self._kit, self._bench = _kit(), bench
        self.log = bench.directory / "engine.log"

    def __enter__(self) -> Engine:
        control = self._bench.directory / "slow.json"
        control.write_text(json.dumps(FULL_SPEED))
        path = f"{KIT / 'site'}:{ROOT / 'benchmarks'}"
        env = self._kit.environment("tiny", PYTHONPATH=path, HICACHE_BENCH_SLOW=str(control))
        child = Path(__file__).with_name("engine_child.py")
        command = [sys.executable, str(child), json.dumps(_arguments(self._kit, self._bench)), str(control)]
        with open(self.log, "w") as log_file:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env=env,
                start_new_session=True,
            )
        try:
            self._answer()
        except BaseException:
            self._kit.end_group(self._child)
            raise
        return self

    def step(self, step: dict[str, Any]) -> dict[str, Any]:
        """Raises EngineEnded when there is no answer within STEP_LIMIT_S."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(step) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        watchdog = threading.Timer(STEP_LIMIT_S, self._kit.end_group, [self._child])
        watchdog.start()
        try:
            for text in self._child.stdout or ():
                if text.startswith("HCX "):
                    with open(self._bench.directory / "answers.jsonl", "a") as raw:
                        raw.write(text[4:])
                    return dict(json.loads(text[4:]))
        finally:
            watchdog.cancel()
        raise EngineEnded(f"no answer; the end of {self.log}:\n{self._kit.tail(self.log)}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kit.end_group(self._child)


def _arguments(kit: Any, bench: Bench) -> dict[str, Any]:
    """Arguments of the engine: our backend, slowed, through ``dynamic``, served by our pipeline."""
    model = bench.directory / "model"
    if not (model / "config.json").exists():
        import models

        models.write_model("tiny", str(model))
    extra = {
        "module_path": "slow_backend",
        "class_name": "SlowHiCacheExtStorage",
        "path": str(bench.directory / "store"),
        "capacity": "2GiB",
        "prefetch_threshold": 256,
        "pipeline": "extension",
        "prefetch_policy": "timeout",
    }
    arguments = kit.engine_arguments(
        str(model), page_size=PAGE_TOKENS, max_total_tokens=16384, max_running_requests=8, dtype="float32"
    )
    storage = kit.storage_arguments("dynamic", "page_first_direct", extra)
    return {**arguments, **storage, "hicache_ratio": 4.0, "hicache_storage_prefetch_policy": "timeout"}


def _kit() -> Any:
    if not KIT.is_dir():
        raise BadInput("--real needs the repository: the CPU stand-ins lie in tests/sglang_cpu")
    if str(KIT) not in sys.path:
        sys.path.append(str(KIT))
    import engine_kit

    return engine_kit
