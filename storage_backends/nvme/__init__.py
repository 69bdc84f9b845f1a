"""The NVMe page store: segment files, an LMDB index, reclaim and recovery. ``store.NvmeStore`` is the way in."""
