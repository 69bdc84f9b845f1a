"""Identity of model weights: what the files hold, not where they lie or what they are called.

Paths differ between nodes and are overwritten in place, so the identity is a hash over each file's header, its size
and samples of every tensor. It does not read everything: two checkpoints that differ in a few values only, outside
the sampled ones, look alike; `namespace` in the config keeps them apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

SAMPLE_BYTES = 256
"""Bytes taken at the start, the middle and the end of each tensor."""

MAX_HEADER_BYTES = 128 << 20
"""A safetensors header above this is not believed; the file is then sampled as plain bytes."""

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""First pattern with files wins, as in SGLang's loader."""


def weights_identity(directory: str | os.PathLike[str]) -> str:
    """32 hex digits that name the weights in ``directory``; "" when it holds no weight files.

    Two directories with the same files give the same answer, whatever their names and times.
    """
    files = _weight_files(Path(directory))
    if not files:
        return ""
    digest = hashlib.sha256(b"hicache-ext-weights-1\0")
    for file in files:
        digest.update(_file_digest(file))
    return digest.hexdigest()[:32]


def _weight_files(directory: Path) -> list[Path]:
    if directory.is_file():
        return [directory]
    for pattern in WEIGHT_PATTERNS:
        files = sorted(directory.glob(pattern), key=lambda p: p.name)
        if files:
            return files
    return []


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256(path.name.encode() + b"\0")
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        digest.update(struct.pack("<Q", size))
        header, start = _safetensors_header(f.fileno(), size) if path.suffix == ".safetensors" else (b"", 0)
        digest.update(header)
        for offset, nbytes in _samples(header, start, size):
            digest.update(os.pread(f.fileno(), nbytes, offset))
    return digest.digest()


def _safetensors_header(fd: int, size: int) -> tuple[bytes, int]:
    raw = os.pread(fd, 8, 0)
    (length,) = struct.unpack("<Q", raw) if len(raw) == 8 else (0,)
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        return b"", 0
    return os.pread(fd, length, 8), 8 + length


def _samples(header: bytes, start: int, size: int) -> Iterator[tuple[int, int]]:
    for low, high in _extents(header, start, size):
        for offset in sorted({low, (low + high) // 2, max(low, high - SAMPLE_BYTES)}):
            yield offset, min(SAMPLE_BYTES, high - offset)


def _extents(header: bytes, start: int, size: int) -> list[tuple[int, int]]:
    try:
        tensors = json.loads(header) if header else {}
        offsets = sorted(t["data_offsets"] for name, t in tensors.items() if name != "__metadata__")
        return [(start + int(low), start + int(high)) for low, high in offsets]
    except (ValueError, KeyError, TypeError, AttributeError):
        step = max(1, size // 64)
        return [(low, min(size, low + step)) for low in range(0, size, step)]
