"""The arms: one SGLang server each, started afresh for every round, on a random model and the CPU, or on a GPU."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BadInput, WarmRead, drop_page_cache, files_below, require_cold_files

from cold_start_bench.client import Client
from cold_start_bench.points import PAGE_TOKENS

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "tests" / "sglang_cpu"
ADMIN_KEY = "bench"
NVME = ("nvme-auto", "nvme-io_uring", "nvme-posix", "nvme-kvikio", "nvme-aiofiles")
POOLED = ("tiered", "tiered-fresh")
ARMS = ("recompute", "file", "nixl", *NVME, *POOLED, "linker")


def engine_kit() -> Any:
    """The tests' kit that starts SGLang; only in a checkout."""
    if not KIT.is_dir():
        raise BadInput(f"{KIT} is missing: run from a checkout, or give --url")
    if str(KIT) not in sys.path:
        sys.path.append(str(KIT))
    import engine_kit as kit

    return kit


def random_model(kind: str, directory: str) -> str:
    """Write the CPU kit's random model of ``kind``; returns the directory."""
    engine_kit()
    import models

    write: Any = models.write_model
    return str(write(kind, directory))


@dataclass(frozen=True, slots=True)
class ServerArm:
    """What to start.

    Attributes:
        name: one of ARMS.
        model: directory of the model; ``kind`` is its kind in the CPU kit.
        folder: log of this arm; stores lie beside it, one per family.
        device: "cpu" or "cuda".
        max_tokens: KV pool of the device, in tokens; ``context`` longest request.
        master: address of the Mooncake master, for the arms in POOLED.
    """

    name: str
    model: str
    kind: str
    folder: Path
    device: str
    max_tokens: int
    context: int
    layout: str = "page_first_direct"
    master: str = ""

    @property
    def has_storage(self) -> bool:
        return self.name != "recompute"

    @property
    def is_fresh(self) -> bool:
        """Each restart is a node whose drive is empty: everything comes from the pool."""
        return self.name == "tiered-fresh"

    @property
    def family(self) -> str:
        """Arms of one family read the same pages: our engines each other's, a fresh node those of its pool."""
        return "nvme" if self.name in NVME else "tiered" if self.name in POOLED else self.name

    @property
    def store(self) -> Path:
        return self.folder.parent / ("store-fresh" if self.is_fresh else f"store-{self.family}")

    def storage_arguments(self) -> dict[str, Any]:
        """SGLang's arguments for this arm's store."""
        kit = engine_kit()
        ours = {"path": str(self.store), "capacity": "8GiB"}
        if self.name == "linker":
            return dict(kit.linker_arguments(ours))
        backend, config = self.name, {}
        if self.name == "nixl":
            config = {"plugin": {"posix": {"active": True, "use_uring": "true"}}}
        elif self.name in NVME:
            backend, config = "nvme", {**ours, "engine": self.name.removeprefix("nvme-")}
        elif self.name in POOLED:
            backend, config = "tiered", {**ours, "master": self.master}
        return dict(kit.storage_arguments(backend, self.layout, {**config, "prefetch_threshold": 256}))

    def arguments(self) -> dict[str, Any]:
        kit = engine_kit()
        more: dict[str, Any] = {
            "max_total_tokens": self.max_tokens,
            "context_length": self.context,
            "max_running_requests": 16,
            "device": self.device,
        }
        if self.has_storage:
            more |= self.storage_arguments()
        return dict(kit.engine_arguments(self.model, **more))

    def environment(self) -> dict[str, str]:
        return {
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.store),
            "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(self.store),
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "NIXL_LOG_LEVEL": "FATAL",
        }

    @contextmanager
    def serve(self, limit_s: float = 420.0) -> Iterator[RunningServer]:
        """A fresh server: no GPU cache, no host cache. It is killed at the end, as a crash would."""
        kit = engine_kit()
        for made in (self.folder, self.store):
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self.folder / "server.log"
        started = kit.Server(
            self.arguments(), self.kind, log, limit_s=limit_s, admin_key=ADMIN_KEY, **self.environment()
        )
        with started as server:
            tier = "host" if self.name == "linker" else "storage"
            client = Client(f"http://127.0.0.1:{server.port}", ADMIN_KEY, storage_tier=tier)
            yield RunningServer(self, client, server._child.pid)

    def make_cold(self) -> str:
        """Get the store's files out of the page cache and prove it; a fresh node has none."""
        if not self.has_storage:
            return ""
        if self.is_fresh:
            if self.store.exists():
                shutil.rmtree(self.store)
            return "the node's drive was emptied"
        files = files_below(self.store)
        how = drop_page_cache(files)
        require_cold_files(files)
        return how


@dataclass(frozen=True, slots=True)
class RunningServer:
    arm: ServerArm
    client: Client
    pid: int

    def io_bytes(self) -> tuple[int, int]:
        """(read, written) bytes of block devices by the server and its children so far."""
        read = written = 0
        for pid in _tree(self.pid):
            try:
                fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            except OSError:
                continue
            read, written = read + int(fields["read_bytes"]), written + int(fields["write_bytes"])
        return read, written

    def ours(self) -> dict[str, Any]:
        """The state of our backend; empty when it is another one."""
        return dict((self.client.server_info()["internal_states"] or [{}])[0].get("hicache_ext") or {})

    def waiting_pages(self) -> int:
        """Pages that our backend has accepted and not yet brought where they belong."""
        state = self.ours()
        queued = state.get("queued_offload_pages", 0) + state.get("store", {}).get("queued_pages", 0)
        return int(queued + state.get("retry_pages", 0))

    def describe(self) -> dict[str, Any]:
        """Our backend's own description, or what SGLang says about another one."""
        info, ours = self.client.server_info(), self.ours()
        keys = ("device", "hicache_storage_backend", "hicache_mem_layout", "page_size", "max_total_num_tokens")
        return {**{k: info.get(k) for k in keys}, **({"hicache_ext": ours} if ours else {})}


def _tree(root: int) -> list[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def require_device_reads(server: RunningServer, before: int, tokens: int, token_bytes: int) -> int:
    """Bytes the server read from the device since ``before``; WarmRead when they are too few for the tokens.

    A fresh node has nothing on its device: its pages must have come from the pool.
    """
    read = server.io_bytes()[0] - before
    if server.arm.is_fresh:
        pages = server.ours()["counters"].get("tier_far_pages", 0)
        if pages * PAGE_TOKENS < 0.95 * tokens:
            raise WarmRead(f"{server.arm.name}: {tokens} tokens from storage but only {pages:.0f} pages from the pool")
        return read
    if read < 0.95 * tokens * token_bytes:
        raise WarmRead(f"{server.arm.name}: {tokens} tokens from storage but only {read:,} bytes from the device")
    return read


def engine_dtype(device: str) -> str:
    """What a server of this benchmark computes in, and with it its KV pool."""
    return str(engine_kit().engine_arguments("", device=device)["dtype"])


def kv_token_bytes(model: str, dtype: str = "") -> int:
    """KV bytes per token of an MHA or MLA model, from its config; 0 when it cannot be told.

    Args:
        dtype: what the server computes in, where that is not the config's.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        size = 4 if (dtype or config.get("torch_dtype", config.get("dtype"))) == "float32" else 2
        if "kv_lora_rank" in config:
            return int(config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * size)
        return int(2 * config["num_hidden_layers"] * heads * dim * size)
    except (OSError, ValueError, KeyError):
        return 0
