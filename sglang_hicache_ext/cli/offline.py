"""Opening a store that exists, from its directories alone, beside the servers that use it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.nvme.layout import existing_capacity
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.storage_backends.nvme.survey import NamespaceSurvey

NICE, IO_LOWEST = 19, (2 << 13) | 7
"""Least share of the processor; best effort, lowest level, of the drive. Source: nice(2), ioprio_set(2)."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def step_back() -> None:
    """Give the servers precedence over this process, for the processor and, where its scheduler listens, for the drive."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, IO_LOWEST)


class Pace:
    """Holds a tool to ``bytes_per_s`` on average; 0 does not."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._started, self._spent = time.monotonic(), 0

    def spend(self, nbytes: int) -> None:
        """Account for ``nbytes``, and wait until they are due."""
        self._spent += nbytes
        if self._bytes_per_s:
            early = self._spent / self._bytes_per_s - (time.monotonic() - self._started)
            if early > 0:
                time.sleep(early)


def existing_config(paths: Sequence[str]) -> HiCacheExtConfig:
    """The config of the store in ``paths``. Creates nothing. Raises ConfigError: not a directory, not a store of ours."""
    if not paths:
        raise ConfigError("no directory given", "command line", "name the directory of a store")
    for path in paths:
        if not Path(path).is_dir():
            raise ConfigError("not a directory", path, "name the directory of a store")
    return HiCacheExtConfig(path=tuple(paths), capacity=existing_capacity(Path(paths[0])))


@contextmanager
def open_existing(paths: Sequence[str]) -> Iterator[NvmeStore]:
    """The store in ``paths``; it is only opened, never made. Raises ConfigError, CapabilityError, StoreError."""
    store = NvmeStore(existing_config(paths), is_tool=True)
    try:
        yield store
    finally:
        store.close()


def pick_namespaces(store: NvmeStore, wanted: str = "") -> list[NamespaceSurvey]:
    """Namespaces whose id starts with ``wanted`` (hex) or whose fingerprint mentions it; all for "".

    Raises ConfigError when a name was given and nothing matches.
    """
    found = [n for n in store.survey().namespaces() if matches(n.id, n.words, wanted)]
    if wanted and not found:
        known = ", ".join(n.id.hex()[:8] for n in store.survey().namespaces()) or "none"
        raise ConfigError(f"no namespace matches {wanted!r}", "command line", f"known ids: {known}")
    return found


def matches(ns_id: bytes, words: Mapping[str, Any] | None, wanted: str) -> bool:
    """Whether a namespace is meant by ``wanted``: the first hex digits of its id, or a word of its fingerprint; "" means all."""
    return not wanted or ns_id.hex().startswith(wanted.lower()) or any(wanted in str(v) for v in (words or {}).values())


def handle_of(store: NvmeStore, found: NamespaceSurvey) -> Namespace:
    """The handle of a surveyed namespace. Raises ConfigError when its fingerprint is not known in words."""
    for ns in store.namespaces():
        if ns.id == found.id:
            return ns
    raise ConfigError(
        f"the fingerprint of namespace {found.id.hex()[:8]} is not known in words",
        "store",
        "remove it with gc --namespace",
    )
