"""The load of a server on a store, in a process of its own: stamped pages are written and read without a pause, every byte checked.

    python -m sglang_hicache_ext.testing.load TASK    (a JSON object: config, name, page_bytes, most_pages)

Answers each line on stdin with a line of JSON on stdout: "run SECONDS" works, "check" reads every page it ever wrote,
anything else ends it. ``Load`` is the other end.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.testing.stamps import HostArena, page_key

BATCH = 32
READS_A_WRITE = 4


class _Server:
    """``most_pages`` written, it only reads."""

    def __init__(self, config: HiCacheExtConfig, name: str, page_bytes: int, most_pages: int) -> None:
        self._store = NvmeStore(config)
        self._ns = self._store.namespace(Fingerprint(model=name, page_tokens=16))
        self._arena = HostArena(BATCH, [page_bytes // 2] * 2)
        self._name, self._most_pages = name, most_pages
        self._dice = random.Random(name)
        self._keys: list[bytes] = []
        self._done: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if len(self._keys) < self._most_pages:
                self._write()
            for _ in range(READS_A_WRITE):
                self._read(self._dice.sample(self._keys, BATCH))

    def check(self) -> None:
        for at in range(0, len(self._keys), BATCH):
            self._read(self._keys[at : at + BATCH])

    def report(self) -> dict[str, Any]:
        """Pages written, queried, wrong, lost and refused so far, and the store's own outcomes."""
        names = ("written", "queried", "wrong", "lost", "refused")
        outcomes = self._store.metrics.snapshot().outcomes
        return {**{n: self._done[n] for n in names}, "outcomes": dict(outcomes)}

    def close(self) -> None:
        self._store.close()

    def _write(self) -> None:
        new = [page_key(len(self._keys) + i, self._name) for i in range(BATCH)]
        result = self._store.write(self._ns, new, self._arena.fill(self._ns.id, new))
        self._done["refused"] += sum(not o.is_stored for o in result.outcomes)
        self._done["written"] += BATCH
        self._keys += new

    def _read(self, wanted: Sequence[bytes]) -> None:
        self._arena.poison()
        outcomes = self._store.read(self._ns, wanted, self._arena.regions.slice(0, len(wanted))).outcomes
        self._done["queried"] += len(wanted)
        self._done["lost"] += sum(o is not Outcome.LOADED for o in outcomes)
        self._done["wrong"] += sum(
            o is Outcome.LOADED and not self._arena.holds(row, self._ns.id, wanted[row])
            for row, o in enumerate(outcomes)
        )


class Load:
    """A child process that loads the store of ``config``. ``answer`` after each ``ask``; ``close`` always."""

    def __init__(self, config: dict[str, Any], name: str, page_bytes: int, most_pages: int) -> None:
        task = json.dumps({"config": config, "name": name, "page_bytes": page_bytes, "most_pages": most_pages})
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, task], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()

    def ask(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The child's counts. Raises RuntimeError when it died."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the load ended with {self._child.wait(10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the child, by force when it takes longer than 20 s."""
        try:
            self._child.communicate("stop\n", timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()


def main(task: dict[str, Any]) -> None:
    server = _Server(HiCacheExtConfig.parse(task["config"]), task["name"], task["page_bytes"], task["most_pages"])
    try:
        server.run(0.05)
        print(json.dumps(server.report()), flush=True)
        for line in sys.stdin:
            verb, _, value = line.strip().partition(" ")
            if verb == "run":
                server.run(float(value))
            elif verb == "check":
                server.check()
            else:
                return
            print(json.dumps(server.report()), flush=True)
    finally:
        server.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
