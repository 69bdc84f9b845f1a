"""SGLang HiCache extension: storage backends, prefetch pipeline, PD hooks and an L2-prefetch kernel.

Importing this package imports neither torch nor sglang; only ``sglang_hicache_ext.sglang_adapter`` does.
"""

__version__ = "0.1.0"
