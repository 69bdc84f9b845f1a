"""The parts of an open store that other forms of reading build on."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hicache_ext.storage_backends.nvme.explain import Explainer
from sglang_hicache_ext.storage_backends.nvme.heat import Heat
from sglang_hicache_ext.storage_backends.nvme.index import Index
from sglang_hicache_ext.storage_backends.nvme.lanes import Lanes
from sglang_hicache_ext.storage_backends.nvme.layout import Layout
from sglang_hicache_ext.storage_backends.nvme.reader import Reader


@dataclass(frozen=True, slots=True)
class StoreParts:
    """``number``: of one namespace in the index."""

    number: int
    layout: Layout
    index: Index
    heat: Heat
    lanes: Lanes
    reader: Reader
    explainer: Explainer
