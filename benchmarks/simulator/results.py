"""What one simulated or real run gives: per-request times and the columns of the policy table."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class RunColumns:
    """Sums over a run; tokens and seconds.

    Attributes:
        ttft_s: position in the load -> seconds from arrival to the end of its prefill.
        storage_tokens_used: loaded from L3 and used by the request that asked.
        tokens_thrown_away: loaded from L3, then not used by it.
        recomputed_gpu_s: prefill seconds spent on tokens that L3 held.
        gpu_busy_s: prefill seconds in all.
        deadline_misses: requests that kept an idle server waiting longer than recomputing their hit would have taken.
        host_page_s: host pages times the seconds they were allocated for prefetch and of no other use.
        input_tokens, cached_tokens: of all requests; cached counts L1, L2 and L3.
        input_pages, cached_pages: the same in pages, a partial last page counted as one.
        storage_hit_tokens: hits of the L3 queries.
        prefetches, stopped, declined: prefetches with a hit, ended by the policy, refused for host pages.
        wait_s: seconds that requests waited for L3, time in which no server was free left out.
    """

    ttft_s: dict[int, float] = field(default_factory=dict)
    storage_tokens_used: float = 0
    tokens_thrown_away: float = 0
    recomputed_gpu_s: float = 0.0
    gpu_busy_s: float = 0.0
    deadline_misses: int = 0
    host_page_s: float = 0.0
    input_tokens: int = 0
    cached_tokens: float = 0
    input_pages: int = 0
    cached_pages: int = 0
    storage_hit_tokens: float = 0
    prefetches: int = 0
    stopped: int = 0
    declined: int = 0
    wait_s: float = 0.0

    def ttft(self, percentile: float) -> float:
        """Percentile of TTFT in seconds."""
        return float(np.percentile(list(self.ttft_s.values()), percentile))

    def table(self) -> dict[str, float]:
        """The columns of the policy comparison, by name with unit."""
        return {
            "ttft_p50_s": self.ttft(50),
            "ttft_p90_s": self.ttft(90),
            "ttft_p99_s": self.ttft(99),
            "hit_tokens_used": float(self.storage_tokens_used),
            "tokens_thrown_away": float(self.tokens_thrown_away),
            "gpu_s_recomputed": self.recomputed_gpu_s,
            "deadline_misses": float(self.deadline_misses),
            "host_page_s": self.host_page_s,
            "gpu_busy_s": self.gpu_busy_s,
            "cached_share": self.cached_tokens / max(1, self.input_tokens),
        }


def median_interval(
    samples: NDArray[np.float64] | list[float], seed: int = 1, rounds: int = 400
) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    values = np.asarray(samples, np.float64)
    draws = np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))
    low, high = np.percentile(np.median(values[draws], axis=1), [2.5, 97.5])
    return float(low), float(high)
