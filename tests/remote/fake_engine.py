"""An object store in a dict, with the faults of the real one: hangs, late writes after an error, wrong bytes, a full pool.

Runs as threads of the test (``ThreadWorker``), where the test steers it directly, or in a worker process, where it
reads what to do from the folder in HICACHE_EXT_TEST_FOLDER.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

NO_SPACE, NOT_FOUND, TRANSFER_FAILED, RPC_FAILED = -200, -704, -800, -900


class FakeEngine:
    """Steer it through the attributes; every list keeps what happened.

    Attributes:
        hang: while set (cleared = hanging), gets of names in ``hanging`` wait.
        hanging, failing, unreachable: names whose get hangs; fails with -800 and is written later; all calls fail.
        capacity: objects it takes.
        late: (address, bytes) writes to perform when ``deliver_late`` is called.
    """

    latest: FakeEngine | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.objects: dict[str, bytes] = {}
        self.owner: dict[str, list[str]] = {}
        self.hanging: set[str] = set()
        self.failing: set[str] = set()
        self.resume = threading.Event()
        self.is_hung = threading.Event()
        self.unreachable = False
        self.capacity = 1 << 30
        self.late: list[tuple[int, bytes]] = []
        self.gets: list[list[str]] = []
        self.targets: list[int] = []
        self.puts: list[list[str]] = []
        self.removed: list[str] = []
        self.closed = False
        self.next_peer = "node-0"
        folder = os.environ.get("HICACHE_EXT_TEST_FOLDER")
        self.folder = Path(folder) if folder else None
        FakeEngine.latest = self

    def open(self, addr: int, nbytes: int) -> dict[str, Any]:
        if self.folder and (self.folder / "refuse").exists():
            raise RuntimeError("refused by the test")
        if self.folder and (self.folder / "scribble").exists():
            threading.Thread(target=self._scribble, args=(addr, nbytes), daemon=True).start()
        return {"endpoint": "fake"}

    def _scribble(self, addr: int, nbytes: int) -> None:
        value = 0
        while True:
            value = (value + 1) % 256
            ctypes.memset(addr, value, nbytes)

    def register(self, addr: int, nbytes: int) -> int:
        return 0

    def get(self, names: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        self.gets.append(names)
        self.targets += addrs
        return [self._get(n, [a], [s]) for n, a, s in zip(names, addrs, sizes, strict=True)]

    def get_parts(self, names: list[str], addrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        self.gets.append(names)
        return [self._get(n, a, s) for n, a, s in zip(names, addrs, sizes, strict=True)]

    def _get(self, name: str, addrs: list[int], sizes: list[int]) -> int:
        if self.unreachable:
            return RPC_FAILED
        data = self.objects.get(name)
        if data is None:
            return NOT_FOUND
        if name in self.hanging or (self.folder and (self.folder / "hang").exists() and len(data) > 64):
            self.is_hung.set()
            if self.folder:
                (self.folder / "hung").touch()
            self.resume.wait()
        if name in self.failing:
            self.late.append((addrs[0], b"\xee" * sizes[0]))
            return TRANSFER_FAILED
        if len(data) > sum(sizes):
            return -600
        start = 0
        for addr, size in zip(addrs, sizes, strict=True):
            part = data[start : start + size]
            ctypes.memmove(addr, part, len(part))
            start += size
        return len(data)

    def deliver_late(self) -> None:
        """Write what was reported as failed."""
        for addr, data in self.late:
            ctypes.memmove(addr, data, len(data))

    def put(self, names: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        self.puts.append(names)
        return [self._put(n, a, s) for n, a, s in zip(names, addrs, sizes, strict=True)]

    pin = put

    def _put(self, name: str, addr: int, size: int) -> int:
        if self.unreachable:
            return RPC_FAILED
        if name in self.objects:
            return 0
        if len(self.objects) >= self.capacity:
            return NO_SPACE
        self.objects[name] = ctypes.string_at(addr, size)
        self.owner[name] = [self.next_peer]
        return 0

    def exist(self, names: list[str]) -> list[int]:
        return [RPC_FAILED if self.unreachable else int(n in self.objects) for n in names]

    def remove(self, names: list[str]) -> list[int]:
        found = [0 if self.objects.pop(n, None) is not None else NOT_FOUND for n in names]
        self.removed += [n for n, code in zip(names, found, strict=True) if code == 0]
        return found

    def remove_prefix(self, prefix: str) -> int:
        gone = [n for n in self.objects if n.startswith(prefix)]
        for name in gone:
            del self.objects[name]
        return len(gone)

    def peers(self, names: list[str]) -> list[list[str]]:
        return [self.owner.get(n, []) for n in names]

    def close(self) -> None:
        self.closed = True
