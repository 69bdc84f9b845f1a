"""The four classes that SGLang asks a PD transfer backend for."""

from __future__ import annotations

from sglang_hicache_ext.sglang_adapter.pd_bootstrap import HiCacheExtBootstrapServer
from sglang_hicache_ext.sglang_adapter.pd_manager import HiCacheExtTransfer
from sglang_hicache_ext.sglang_adapter.pd_requests import HiCacheExtKVReceiver, HiCacheExtKVSender

CLASSES = {
    "manager": HiCacheExtTransfer,
    "sender": HiCacheExtKVSender,
    "receiver": HiCacheExtKVReceiver,
    "bootstrap_server": HiCacheExtBootstrapServer,
}
