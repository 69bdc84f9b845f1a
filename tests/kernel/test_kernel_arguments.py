"""Bad input is refused before any launch, by a message with the shape or value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.kernels.l2_prefetch import attention
from sglang_hicache_ext.kernels.l2_prefetch.attention import alloc_workspace, decode_attention
from sglang_hicache_ext.kernels.l2_prefetch.check import DecodeParams, KvIndex
from sglang_hicache_ext.kernels.l2_prefetch.planner import Plan, Prefetch
from sglang_hicache_ext.kernels.l2_prefetch.schedule import single_split
from sglang_hicache_ext.kernels.l2_prefetch.tuning import load_table

SLOTS, HEADS, KV_HEADS, DIM = 128, 8, 2, 64


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: Any) -> None:
        pytest.fail("launched in spite of bad input")

    monkeypatch.setattr(attention._Call, "launch", launched)


def call(**changes: Any) -> None:
    args: dict[str, Any] = {
        "q": torch.zeros(2, HEADS, DIM, dtype=torch.bfloat16),
        "k": torch.zeros(SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16),
        "v": torch.zeros(SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16),
        "index": KvIndex(torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 1, 2, 60, 127])),
        "params": DecodeParams(0.125),
        "plan": Plan(load_table().tile("*", 4, 64, "bf16"), (1, 1), Prefetch("none", 0, False, ()), ()),
    }
    args |= changes
    decode_attention(**args)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def index(indptr: list[int] | None = None, entries: list[int] | None = None, lens: list[int] | None = None) -> KvIndex:
    return KvIndex(
        torch.tensor(indptr or [0, 3, 5], dtype=torch.int32),
        torch.tensor(entries or [0, 1, 2, 60, 127]),
        None if lens is None else torch.tensor(lens, dtype=torch.int32),
    )


PAGED = {"k": bf16(8, KV_HEADS, 16, DIM), "v": bf16(8, KV_HEADS, 16, DIM)}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "q dtype": ({"q": torch.zeros(2, HEADS, DIM)}, r"q is torch.float32.*torch.bfloat16"),
    "q rank": ({"q": bf16(2, HEADS * DIM)}, r"q has shape \(2, 512\).*\[batch, query heads, head_dim\]"),
    "head dim": ({"q": bf16(2, HEADS, 96)}, r"head_dim is 96.*\(64, 128, 256\)"),
    "q stride": ({"q": bf16(2, DIM, HEADS).transpose(1, 2)}, "last dimension must be contiguous"),
    "k dtype": ({"k": torch.zeros(SLOTS, KV_HEADS, DIM)}, r"k pool is torch.float32.*float8_e4m3fn"),
    "kv fp16 with q bf16": (
        {"k": bf16(SLOTS, KV_HEADS, DIM).half(), "v": bf16(SLOTS, KV_HEADS, DIM).half()},
        r"k pool is torch.float16.*with torch.bfloat16 queries",
    ),
    "pool head dim": ({"k": bf16(SLOTS, KV_HEADS, 128)}, r"k pool has head_dim 128, q has 64"),
    "k and v differ": ({"v": bf16(SLOTS + 1, KV_HEADS, DIM)}, r"\(128, 2, 64\).*\(129, 2, 64\)"),
    "pool rank": ({"k": bf16(SLOTS, DIM)}, r"k pool has shape \(128, 64\).*\[slots, KV heads, head_dim\]"),
    "transposed pool": (
        {"k": bf16(SLOTS, DIM, KV_HEADS).transpose(1, 2), "v": bf16(SLOTS, DIM, KV_HEADS).transpose(1, 2)},
        r"k pool is not contiguous enough: shape \(128, 2, 64\), strides \(128, 1, 2\)",
    ),
    "unaligned pool": (
        {"k": bf16(SLOTS * KV_HEADS * DIM + 8)[1:-7].view(SLOTS, KV_HEADS, DIM)},
        "multiple of 16 bytes",
    ),
    "broadcast pool": ({"k": bf16(1, KV_HEADS, DIM).expand(SLOTS, -1, -1)}, "not contiguous enough"),
    "heads": ({"q": bf16(2, 7, DIM)}, r"7 query heads over 2 KV heads.*1 to 16"),
    "group": ({"q": bf16(2, 34, DIM)}, r"34 query heads over 2 KV heads.*1 to 16"),
    "page size": ({"params": DecodeParams(0.1, page_tokens=32)}, r"page_tokens 32.*\(1, 16, 64\)"),
    "layout": ({"params": DecodeParams(0.1, layout="DHN")}, "'NHD', 'HND'"),
    "HND page": (
        {**PAGED, "params": DecodeParams(0.1, page_tokens=64, layout="HND")},
        "k pool has pages of 16 tokens.*page_tokens says 64",
    ),
    "pool too large": (
        dict.fromkeys("kv", torch.empty(1 << 31, KV_HEADS, DIM, dtype=torch.bfloat16, device="meta")),
        "pool of 2147483648 slots.*at most 2147483647",
    ),
    "NHD pages": (
        {"params": DecodeParams(0.1, page_tokens=64), "k": bf16(100, KV_HEADS, DIM), "v": bf16(100, KV_HEADS, DIM)},
        "pool of 100 slots",
    ),
    "window": ({"params": DecodeParams(0.1, window=-1)}, "window -1"),
    "soft cap": ({"params": DecodeParams(0.1, soft_cap=-30.0)}, "soft_cap -30"),
    "scale": ({"params": DecodeParams(float("nan"))}, "sm_scale is nan"),
    "sinks": ({"sinks": torch.zeros(KV_HEADS)}, r"sinks are torch.float32\(2,\).*\(8,\)"),
    "indptr dtype": ({"index": KvIndex(torch.tensor([0, 3, 5]), torch.tensor([0]))}, "indptr is torch.int64"),
    "indptr length": ({"index": index([0, 3])}, r"batch \+ 1 = 3"),
    "entries dtype": (
        {"index": KvIndex(torch.tensor([0, 3, 5], dtype=torch.int32), torch.zeros(5))},
        r"entries are torch.float32\(5,\)",
    ),
    "seq_lens": ({"index": index(lens=[3])}, r"seq_lens are torch.int32\(1,\)"),
    "strided index": (
        {"index": KvIndex(torch.zeros(6, dtype=torch.int32)[::2], torch.zeros(5, dtype=torch.int64))},
        "indptr has stride 2",
    ),
    "out": ({"out": bf16(2, HEADS, 128)}, r"out is torch.bfloat16\(2, 8, 128\)"),
    "lse": ({"lse": bf16(2, HEADS)}, r"lse is torch.bfloat16\(2, 8\)"),
    "device": ({"q": torch.zeros(2, HEADS, DIM, dtype=torch.bfloat16, device="meta")}, "meta and cpu"),
    "slot beyond the pool": (
        {"index": index(entries=[0, 1, 2, 128, 3]), "check_indices": True},
        "entry 3 of request 1 is 128.*0 to 127",
    ),
    "negative slot": (
        {"index": index(entries=[0, -1, 2, 3, 4]), "check_indices": True},
        "entry 1 of request 0 is -1",
    ),
    "page beyond the pool": (
        {
            **PAGED,
            "params": DecodeParams(0.1, page_tokens=16, layout="HND"),
            "index": index([0, 1, 2], [0, 8], [16, 1]),
            "check_indices": True,
        },
        "entry 1 of request 1 is 8.*0 to 7",
    ),
    "more tokens than pages": (
        {
            **PAGED,
            "params": DecodeParams(0.1, page_tokens=16, layout="HND"),
            "index": index([0, 1, 2], [0, 1], [17, 1]),
            "check_indices": True,
        },
        "request 0 has 17 tokens.*hold 16",
    ),
    "indptr backwards": ({"index": index([0, 5, 3]), "check_indices": True}, "indptr goes backwards"),
    "indptr beyond entries": ({"index": index([0, 3, 9]), "check_indices": True}, "indptr ends at 9.*entries has 5"),
    "schedule": ({"schedule": single_split(1, "cpu")}, "schedule of 1 requests"),
    "workspace": ({"workspace": alloc_workspace(1, HEADS, DIM, "cpu")}, r"workspace of \(1, 8, 64\).*\(2, 8, 64\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_shape_and_allowed_values(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        call(**changes)


def test_good_input_reaches_the_launch() -> None:
    with pytest.raises(pytest.fail.Exception, match="launched"):
        call(check_indices=True)


def test_an_empty_batch_launches_nothing() -> None:
    q = bf16(0, HEADS, DIM)
    assert decode_attention(
        q,
        bf16(SLOTS, KV_HEADS, DIM),
        bf16(SLOTS, KV_HEADS, DIM),
        KvIndex(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)),
        DecodeParams(0.1),
    ).shape == (0, HEADS, DIM)
