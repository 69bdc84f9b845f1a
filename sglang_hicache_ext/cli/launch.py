"""`hicache-ext launch`: the SGLang flags for this machine and model, each with its reason."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hicache_ext.cli.render import OK, Output, size_text
from sglang_hicache_ext.errors import ConfigError

PAGE_TOKENS = 64
MIN_REGION_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size of a page; from the model's config.json."""

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int

    def page_bytes(self, tp: int, page_tokens: int = PAGE_TOKENS) -> int:
        """Bytes of one rank's page. Heads are replicated when there are fewer than ranks."""
        heads = max(1, self.kv_heads // tp)
        return page_tokens * self.layers * heads * (self.k_dim + self.v_dim) * self.itemsize

    def region_bytes(self, tp: int, page_tokens: int = PAGE_TOKENS) -> int:
        """Bytes of the smaller of a page's regions (K or V) in page_first layout."""
        dims = [d for d in (self.k_dim, self.v_dim) if d]
        return page_tokens * self.layers * max(1, self.kv_heads // tp) * min(dims) * self.itemsize


def read_shape(model: str) -> ModelShape:
    """The shape of a local model directory. Raises ConfigError."""
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as err:
        raise ConfigError(
            f"cannot read config.json: {err.strerror}", str(path), "name a local model directory"
        ) from err
    except ValueError as err:
        raise ConfigError("config.json is not JSON", str(path), "name a local model directory") from err
    text: dict[str, Any] = config.get("text_config") or config
    try:
        layers = int(text["num_hidden_layers"])
        itemsize = 4 if str(text.get("torch_dtype", text.get("dtype", ""))).endswith("float32") else 2
        if "kv_lora_rank" in text:
            return ModelShape(layers, 1, int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]), 0, itemsize)
        heads = int(text["num_attention_heads"])
        dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        return ModelShape(layers, kv_heads, dim, int(text.get("v_head_dim") or dim), itemsize)
    except (KeyError, TypeError, ValueError) as err:
        raise ConfigError(
            f"config.json lacks {err}", str(path), "write the flags by hand; docs/sizing.md says how"
        ) from err


def run(model: str, paths: list[str], tp: int, capacity: str, out: Output) -> int:
    """Print one command line and why each part is there."""
    shape = read_shape(model)
    extra: dict[str, Any] = {"path": paths[0] if len(paths) == 1 else paths, "capacity": capacity or _capacity(paths)}
    flags: list[tuple[str, str, str]] = [
        ("--model-path", model, "the model"),
        ("--tp", str(tp), "ranks; each stores its own shard") if tp > 1 else ("", "", ""),
        ("--enable-hierarchical-cache", "", "HiCache is what the store plugs into"),
        ("--page-size", str(PAGE_TOKENS), _page_reason(shape, tp)),
        ("--hicache-ratio", "2", "host pool twice the device pool; prefetch needs room to land in"),
        ("--hicache-mem-layout", "page_first", "a page is two regions, so a read is one operation"),
        ("--hicache-io-backend", "kernel", "goes with page_first"),
        ("--hicache-write-policy", "write_through", "every page reaches the store once it was computed"),
        ("--hicache-storage-backend", "nvme", "this package"),
        ("--hicache-storage-prefetch-policy", "timeout", "bounded wait; docs/policies.md compares them"),
        ("--hicache-storage-backend-extra-config", json.dumps(extra), "where, and how much"),
        ("--enable-metrics", "", "every page in one outcome"),
    ]
    flags = [f for f in flags if f[0]]
    words = ["python", "-m", "sglang.launch_server"]
    for flag, value, _ in flags:
        words += [flag, value] if value else [flag]
    page = shape.page_bytes(tp)
    out.document({"command": words, "reasons": {f: why for f, _, why in flags}, "page_bytes": page})
    out.line(shlex.join(words))
    out.table(("flag", "value", "why"), flags)
    out.line(f"one page of {PAGE_TOKENS} tokens is {size_text(page)} a rank, {size_text(page / PAGE_TOKENS)} a token")
    return OK


def _page_reason(shape: ModelShape, tp: int) -> str:
    region = shape.region_bytes(tp)
    fits = "4 KiB aligned, so it is read without a copy" if region % MIN_REGION_BYTES == 0 else (
        "not a multiple of 4 KiB: pages go through a copy"
    )  # fmt: skip
    return f"K and V of a page are {size_text(region)} each; {fits}"


def _capacity(paths: list[str]) -> str:
    """Nine tenths of what is free on the drives, in whole GiB."""
    free = 0
    for path in paths:
        there = Path(path)
        while not there.exists() and there != there.parent:
            there = there.parent
        fs = os.statvfs(there)
        free += fs.f_bavail * fs.f_frsize
    gib = max(1, int(free * 0.9) >> 30)
    return f"{gib}GiB"
