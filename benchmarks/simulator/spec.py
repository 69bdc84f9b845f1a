"""What a simulated node is made of. Every field is an assumption that results print."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from sglang_hicache_ext.errors import ConfigError

SGLANG_BATCH_PAGES = 128
"""Pages per storage read. Source: sglang 0.5.23 srt/mem_cache/hicache_storage.py:24."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One prefill node. The defaults are a 70 B GQA model in bfloat16 on eight GPUs with four PCIe 4.0 drives.

    Attributes:
        prefill_tokens_per_s: of one prefill server, linear in the tokens computed.
        prefill_overhead_s: per request, whatever its length.
        servers: prefill servers that share this node's caches.
        kv_bytes_per_token: over all ranks: 2 x layers x KV heads x head size x bytes.
        l1_tokens, l2_tokens: capacities of the GPU's and the host's cache.
        l3_tokens: capacity of L3; 0 for no limit.
        l3_read_Bps, l3_write_Bps: bytes per second of the whole L3.
        l3_stream_Bps: what one read batch can reach alone; 0 for no cap.
        load_back_Bps: host to GPU; overlaps with computing layer by layer.
        query_s: one hit query; one query thread serves all requests in turn.
        first_batch_tokens, batch_tokens: tokens of a request's first read, doubling up to the largest.
        io_workers: reads in flight.
        is_fair: our pipeline's order; False is SGLang's: whole requests, first come, first served, equal batches.
        threshold_tokens: hits below it are recomputed.
        host_share: part of L2 that requested, unfinished prefetches may occupy.
        poll_s: pause between two admission polls of an idle scheduler.
    """

    prefill_tokens_per_s: float = 50_000.0
    prefill_overhead_s: float = 0.02
    servers: int = 1
    kv_bytes_per_token: int = 70_272
    l1_tokens: int = 600_000
    l2_tokens: int = 1_200_000
    l3_tokens: int = 0
    l3_read_Bps: float = 12e9
    l3_stream_Bps: float = 0.0
    l3_write_Bps: float = 8e9
    load_back_Bps: float = 200e9
    query_s: float = 0.0005
    first_batch_tokens: int = 16 * 64
    batch_tokens: int = SGLANG_BATCH_PAGES * 64
    io_workers: int = 2
    is_fair: bool = True
    threshold_tokens: int = 256
    host_share: float = 0.5
    poll_s: float = 0.005

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            is_zero_fine = f.name in ("prefill_overhead_s", "l3_tokens", "l3_stream_Bps", "query_s", "threshold_tokens")
            if not math.isfinite(value) or value < 0 or (value == 0 and not is_zero_fine and f.name != "is_fair"):
                raise ConfigError(f"{f.name} is {value!r}", "simulated node", "write a positive number")

    @property
    def break_even_Bps(self) -> float:
        """Bytes per second of L3 below which loading a token takes longer than computing it."""
        return self.prefill_tokens_per_s * self.kv_bytes_per_token
