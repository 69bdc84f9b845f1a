"""The interpreter's replaced steps refuse what the originals refuse, and overflow as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def double(x, out):  # type: ignore[no-untyped-def]
    value = tl.load(x)
    tl.store(out, value + value)


@triton.jit
def fill(out, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, 4), tl.zeros([SHAPE], tl.int32))


@pytest.mark.parametrize(
    ("number", "fits"), [(2**30 - 1, True), (2**30, False), (-(2**30), True), (-(2**30) - 1, False)]
)
def test_integer_overflow_is_an_error(number: int, fits: bool) -> None:
    x, out = torch.tensor([number], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch: Any = double[(1,)]
    if fits:
        launch(x, out)
        assert int(out) == 2 * number
    else:
        with pytest.raises(InterpreterError, match="OverflowError"):
            launch(x, out)


def test_a_shape_that_is_no_power_of_two_is_refused() -> None:
    launch: Any = fill[(1,)]
    with pytest.raises(InterpreterError, match="power of 2"):
        launch(torch.zeros(4, dtype=torch.int32), SHAPE=3)
