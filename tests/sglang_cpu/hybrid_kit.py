"""SGLang's own fixtures of hybrid models (KV beside SWA or Mamba state) on the CPU, with our storage backend.

Import after ``controller_kit.start()``.
"""

import json
import sys
import types
import unittest
from array import array

import torch

if "sglang.test.test_utils" not in sys.modules:  # the real one imports data sets
    _stand_in = types.ModuleType("sglang.test.test_utils")
    _stand_in.CustomTestCase = unittest.TestCase
    sys.modules["sglang.test.test_utils"] = _stand_in

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures, mixins, storage
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.load_back import UnifiedRadixCacheLoadBackFixtures

_SERVER_ARGS = mixins.ServerArgs
FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
CONFIGS = {
    "mamba": CacheConfig(
        page_size=16,
        components=(FULL, MAMBA),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
        kv_size=1024,
        max_context_len=1024,
    ),
    "swa": CacheConfig(
        page_size=16, components=(FULL, SWA), sliding_window_size=32, kv_size=1024, max_context_len=1024
    ),
}


class _Steps(storage.UnifiedRadixCacheStorageFixtures, UnifiedRadixCacheLoadBackFixtures, unittest.TestCase):
    def runTest(self):
        """Only the fixtures are used."""


class HybridNode:
    """One scheduler's cache with side pools. ``kind``: mamba or swa."""

    def __init__(self, kind, extra):
        self.kind, self.config, self._extra = kind, CONFIGS[kind], extra
        self._steps = _Steps()
        self._steps.cfg = self.config
        fixtures.get_device = lambda *_: "cpu"
        fixtures.ServerArgs = lambda **kw: _SERVER_ARGS(device="cpu", **kw)
        mixins.ServerArgs = self._server_args
        self.tree, self.allocator, self.requests = storage.build_fixture(self.config)
        self._steps._init_hicache(self.tree, storage_backend="file", storage_dir=".", prefetch_threshold=1)

    def _server_args(self, **kw):
        if kw.get("hicache_storage_backend"):
            kw["hicache_storage_backend"] = "nvme"
            given = json.loads(kw["hicache_storage_backend_extra_config"] or "{}")
            kw["hicache_storage_backend_extra_config"] = json.dumps({**given, **self._extra})
        return _SERVER_ARGS(device="cpu", **kw)

    @property
    def storage(self):
        return self.tree.cache_controller.storage_backend

    def match(self, tokens):
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def tokens(self, pages):
        return self._steps._make_seq(1, pages)

    def rows(self, node):
        """Every device buffer of the node's path with the rows it owns; the window or state only where that is all."""
        slots = self.tree.path_device_indices(node)
        kv = self.allocator.get_kvcache()
        found = [(b, slots) for b in [*kv.full_kv_pool.k_buffer, *kv.full_kv_pool.v_buffer]]
        if self.kind == "swa":
            window = slots[-self.config.sliding_window_size :]
            swa = kv.translate_loc_from_full_to_swa(window).long()
            return found + [(b, swa) for b in [*kv.swa_kv_pool.k_buffer, *kv.swa_kv_pool.v_buffer]]
        state = fixtures.node_device_value(self.tree, node, MAMBA).long().reshape(-1)
        cache = self.requests.mamba_pool.mamba_cache
        layers = [cache.temporal[i] for i in range(len(cache.temporal))]
        layers += [conv[i] for conv in cache.conv for i in range(len(conv))]
        return found + [(b, state) for b in layers]

    def produce(self, tokens, seed=0):
        """Insert ``tokens``, fill every pool with random values, back up to host and storage."""
        self._steps._insert(self.tree, self.allocator, self.requests, tokens)
        node = self.match(tokens).last_device_node
        for number, (buffer, rows) in enumerate(self.rows(node)):
            buffer[rows] = _values(buffer, rows, seed, number)
        self._steps._backup_node(self.tree, node)
        self._steps._write_path_to_l3(self.tree, node)
        self._steps._flush_l3_backups(self.tree, timeout=30)

    def prefetch(self, tokens):
        handle = CacheRequestHandle("request", 0)
        self.tree.prefetch_from_storage(handle, self.tree.root_node_handle(), array("q", tokens), None, None)
        self._steps._run_prefetch_to_completion(self.tree, handle, timeout=30)
        return self.tree.pop_prefetch_loaded_tokens(handle)

    def differing_buffers(self, tokens, seed=0):
        match = self.match(tokens)
        request = self._steps._make_req(self.requests)
        assert self.tree.load_back(match.best_match_node, req=request)
        self.tree.ready_to_load_host_cache()
        self.tree.loading_check()
        node = self.match(tokens).last_device_node
        rows = self.rows(node)
        return len(rows), [
            number
            for number, (buffer, where) in enumerate(rows)
            if not torch.equal(buffer[where], _values(buffer, where, seed, number))
        ]

    def close(self):
        self._steps.doCleanups()
        self.tree.shutdown()
        self.tree.release_host_resources()


def _values(buffer, rows, seed, number):
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return torch.randn(len(rows), *buffer.shape[1:], generator=generator).to(buffer.dtype)
