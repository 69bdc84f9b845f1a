"""Transfer of KV pages from a prefill engine to a decode engine, layer group by layer group.

Independent of SGLang. ``hooks`` is what an engine calls, ``transport`` is the port under it, ``geometry`` is what both
sides must agree on. ``prefill`` and ``decode`` hold the two ends; ``nixl`` and ``mooncake`` move the bytes.
"""
