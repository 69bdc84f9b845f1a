"""What Triton's interpreter lacks, added for the tests.

Inline assembly is recorded; a bf16 dot multiplies numbers and not their bit patterns; a cast to bf16
rounds to nearest even as the hardware does, where the interpreter truncates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

sys.path.insert(0, str(Path(__file__).parent))

import quick_interpreter


@dataclass
class Recorder:
    """Every inline assembly the kernels ran, in order.

    ``events`` holds "wait", "launch_dependents" or ("line" | "bulk", addresses, sizes) of the active lanes.
    """

    events: list[Any] = field(default_factory=list)
    lanes: set[int] = field(default_factory=set)

    def rows(self, row_bytes: int) -> list[int]:
        """Start address of every prefetched row, bulk calls cut into rows and lines merged; sorted."""
        out: list[int] = []
        for kind, addresses, sizes in (e for e in self.events if not isinstance(e, str)):
            for a, n in zip(addresses.tolist(), sizes.tolist(), strict=True):
                out += range(a, a + n, row_bytes if kind == "bulk" else 128)
        return sorted(out)

    def run(self, asm: str, values: list[Any]) -> Any:
        if "griddepcontrol" in asm:
            self.events.append("wait" if ".wait" in asm else "launch_dependents")
            return np.zeros((1,), np.int32)
        address, active = values[0].data, values[1].data != 0
        self.lanes.add(address.size)
        if "cp.async.bulk" in asm:
            self.events.append(("bulk", address[active].copy(), values[2].data[active].copy()))
        else:
            assert "prefetch.global.L2 " in asm
            self.events.append(("line", address[active].copy(), np.full(int(active.sum()), 128)))
        return np.zeros(address.shape, np.int32)


@pytest.fixture(autouse=True)
def quick() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        quick_interpreter.install(patch)
        yield patch


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    record = Recorder()

    class Result:
        def __init__(self, data: Any) -> None:
            self.data = data

        def get_result(self, _: int) -> Any:
            return TensorHandle(self.data, tl.int32)

    def create_inline_asm(self, asm, constraints, values, result_types, pure, pack):  # type: ignore[no-untyped-def]
        return Result(record.run(asm, values))

    plain_cast = InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):  # type: ignore[no-untyped-def]
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle(wide(src.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(src.data).view(np.uint32).astype(np.uint64)
            nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), nearest), tl.bfloat16)
        return plain_cast(self, src, dst_type)

    def wide(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    plain_dot = InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, precision, imprecise):  # type: ignore[no-untyped-def]
        def widen(x: Any) -> Any:
            if x.dtype.scalar != tl.bfloat16:
                return x
            return TensorHandle(wide(x.data), tl.float32)

        return plain_dot(self, widen(a), widen(b), d, precision, imprecise)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
    yield record
