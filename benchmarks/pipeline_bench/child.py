"""The SGLang process of the benchmark: started once, asked once a trial."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 240.0


class SglangChild:
    """Owns the process. Raises RuntimeError with its last words when it dies or stays silent."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._log_path = Path(task["path"]).with_suffix(".log")
        self._log = self._log_path.open("w+")
        env = {**os.environ, "PYTHONPATH": str(_ROOT / "tests" / "sglang_cpu" / "site"), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sglang_child.py")), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
        )
        self.filled = self._answer()

    def ask(self, pipeline: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(pipeline + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        while select.select([out], [], [], _TIMEOUT_S)[0]:
            line = out.readline()
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line[7:])
                return answer
            if not line:
                break
        self._log.seek(0)
        raise RuntimeError("the SGLang process ended or stayed silent: " + self._log.read()[-2000:])

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        self._log.close()
