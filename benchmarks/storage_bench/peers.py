"""SGLang's own stores, driven as its controller drives them.

Source: sglang 0.5.23 managers/cache_controller.py, ``_generic_page_get``/``_generic_page_set`` (file) and
``_page_get_zero_copy``/``_page_set_zero_copy`` (nixl).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from harness import Arena

from storage_bench.shape import Batch, Unavailable


class ArenaPool:
    """The arena as SGLang's page_first MHA host pool; one token is one page, so an index is a page number."""

    layout = "page_first"
    page_size = 1
    pin_memory = False

    def __init__(self, arena: Arena) -> None:
        import torch

        self._torch, self._arena = torch, arena
        self.kv_buffer = torch.from_numpy(arena.halves)

    def get_dummy_flat_data_page(self) -> Any:
        return self._torch.zeros(self._arena.page_bytes, dtype=self._torch.uint8)

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        page = self.kv_buffer[:, index]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        self.kv_buffer[:, index] = data_page.reshape(2, self._arena.half)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        base, half, pages = self._arena.addr, self._arena.half, self._arena.pages
        starts = [base + int(i) * half for i in indices.tolist()]
        pointers = [p for s in starts for p in (s, s + pages * half)]
        return pointers, [half] * len(pointers)

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return self._arena.half % page_size_bytes == 0 and self._arena.addr % page_size_bytes == 0


def _storage_config(extra: dict[str, Any]) -> Any:
    try:
        _let_sglang_import()
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    except ImportError as exc:
        raise Unavailable(f"sglang is not installed: {exc}") from exc
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="bench", extra_config=extra,
    )  # fmt: skip


def _let_sglang_import() -> None:
    """Without torchvision SGLang's modules do not import; the CPU kit of the tests stands in for it."""
    warnings.filterwarnings("ignore", message=r"Only .* (support|supports) .*", category=UserWarning)
    kit = Path(__file__).resolve().parents[2] / "tests" / "sglang_cpu" / "site" / "cpu_kit.py"
    spec = importlib.util.spec_from_file_location("cpu_kit_for_bench", kit)
    if spec is not None and spec.loader is not None and kit.exists():
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.stand_in_for_torchvision()


def _files(directory: str) -> list[Path]:
    return [p for p in Path(directory).rglob("*") if p.is_file()]


def _empty(directory: str) -> None:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            for inner in _files(entry.path):
                inner.unlink()
        else:
            os.unlink(entry.path)


class SglangFile:
    """``--hicache-storage-backend file``: HiCacheFile through the generic path, two copies a page, page cache."""

    name = "sglang-file"
    reads_in_place = False
    is_buffered = True

    def __init__(self, directory: str, arena: Arena) -> None:
        config = _storage_config({})
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        torch.set_num_threads(1)  # its default spins both cores for a 256 KiB copy: kinder to this contestant
        os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
        self._directory, self._pool = directory, ArenaPool(arena)
        self._store = HiCacheFile(config, file_path=directory)

    def write(self, batch: Batch) -> None:
        pages = [self._pool.get_data_page(batch.start + i) for i in range(len(batch))]
        if not self._store.batch_set(batch.names, pages):
            raise RuntimeError("HiCacheFile.batch_set returned False")

    def read(self, batch: Batch) -> None:
        dummies = [self._pool.get_dummy_flat_data_page() for _ in batch.names]
        pages = self._store.batch_get(batch.names, dummies)
        for i, page in enumerate(pages):
            if page is None:
                raise RuntimeError(f"HiCacheFile lost page {i} of a batch")
            self._pool.set_from_flat_data_page(batch.start + i, page)

    def count_present(self, batch: Batch) -> int:
        return int(self._store.batch_exists(batch.names))

    def forget(self) -> None:
        _empty(self._directory)

    def files(self) -> list[Path]:
        return _files(self._directory)

    def describe(self) -> dict[str, Any]:
        return {"class": "HiCacheFile", "io": "page cache, one file a page", "torch_threads": 1}

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class SglangNixl:
    """``--hicache-storage-backend nixl``: HiCacheNixl zero-copy with NIXL's POSIX plugin and O_DIRECT.

    Args:
        use_uring: give the plugin io_uring; otherwise its default.
    """

    reads_in_place = False
    is_buffered = False

    def __init__(self, directory: str, arena: Arena, use_uring: bool) -> None:
        self.name = "nixl-uring" if use_uring else "nixl-default"
        posix = {"active": True, **({"use_uring": "true"} if use_uring else {})}
        config = _storage_config({"plugin": {"posix": posix}, "use_direct_io": True})
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.pop("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", None)
        logging.getLogger("sglang").setLevel(logging.ERROR)
        try:
            import torch
            from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl
        except ImportError as exc:
            raise Unavailable(f"it does not import (pip install --no-deps nixl nixl-cu12): {exc}") from exc
        self._torch, self._directory = torch, directory
        try:
            self._store = HiCacheNixl(config, file_path=directory)
            self._store.register_mem_pool_host(ArenaPool(arena))
        except RuntimeError as exc:
            raise Unavailable(f"NIXL's POSIX plugin did not start: {exc}") from exc

    def _indices(self, batch: Batch) -> Any:
        return self._torch.arange(batch.start, batch.start + len(batch))

    def write(self, batch: Batch) -> None:
        done = self._store.batch_set_v1(batch.names, self._indices(batch))
        if not all(done):
            raise RuntimeError(f"HiCacheNixl.batch_set_v1 stored {sum(done)} of {len(batch)} pages")

    def read(self, batch: Batch) -> None:
        done = self._store.batch_get_v1(batch.names, self._indices(batch))
        if not all(done):
            raise RuntimeError(f"HiCacheNixl.batch_get_v1 read {sum(done)} of {len(batch)} pages")

    def count_present(self, batch: Batch) -> int:
        return int(self._store.batch_exists(batch.names))

    def forget(self) -> None:
        _empty(self._directory)

    def files(self) -> list[Path]:
        return _files(self._directory)

    def describe(self) -> dict[str, Any]:
        return {
            "class": "HiCacheNixl",
            "io": "O_DIRECT, two files a page",
            "is_zero_copy": bool(self._store.is_zero_copy),
            "is_path_mode": bool(self._store.registry.path_mode),
        }

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self._directory, ignore_errors=True)
