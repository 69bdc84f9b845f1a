"""Triton's interpreter with the same results from fewer Python steps.

Its arithmetic is NumPy's; what takes its time is finding out types, again for every operation of every CTA. What
depends on types alone is kept here between calls. Integer overflow, which the interpreter works out and then
ignores, is an error.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

OVERFLOW_OPS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace the slow steps until ``patch`` is undone."""
    patch.setattr(interpreter, "_get_np_dtype", _np_dtype_by_name(interpreter._get_np_dtype))
    patch.setattr(interpreter, "_patch_attr", _patch_attr)
    patch.setattr(interpreter, "_patch_builtin", _patch_builtin)
    patch.setattr(interpreter.GridExecutor, "__call__", _run_grid(interpreter.GridExecutor.__call__))
    patch.setattr(interpreter.InterpretedFunction, "__call__", _call_device_function)
    patch.setattr(tl.core.dtype, "__eq__", _same_type)
    patch.setattr(tl.core.dtype, "is_int", lambda self: self.name in INTEGERS)
    patch.setattr(tl.core, "_unwrap_if_constexpr", _unwrap(tl.core._unwrap_if_constexpr))
    patch.setattr(tl.core.block_type, "__init__", _init_block)
    patch.setattr(tl.core.block_type, "__eq__", _same_block)
    patch.setattr(tl.core.block_type, "to_ir", lambda self, builder: self)
    patch.setattr(tl.core.block_type, "with_element_ty", lambda self, element: _block(element, self.shape))
    patch.setattr(tl.core.tensor, "__init__", _init_tensor)
    _install_semantic(patch, TritonSemantic)


def _install_semantic(patch: pytest.MonkeyPatch, semantic: Any) -> None:
    patch.setattr(semantic, "computation_type_impl", _keep_types(semantic.computation_type_impl))
    patch.setattr(semantic, "binary_op_type_checking_impl", _quick_binary(semantic.binary_op_type_checking_impl))
    patch.setattr(semantic, "cast", _quick_cast(semantic.cast))
    patch.setattr(semantic, "broadcast_impl_value", _quick_broadcast(semantic.broadcast_impl_value))
    patch.setattr(semantic, "binary_op_sanitize_overflow_impl", _refuse_overflow)
    patch.setattr(semantic, "scalar_constant", _keep_constants(semantic.scalar_constant))


_patched: set[tuple[int, ...]] = set()


def _run_grid(plain: Any) -> Any:
    def run_grid(self: Any, *args: Any, **kwargs: Any) -> Any:
        _patched.clear()
        return plain(self, *args, **kwargs)

    return run_grid


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """All of triton.language is scanned and patched at every call; once per launch is enough."""
    modules = tuple(sorted(id(m) for m in self.fn.__globals__.values() if m is tl or m is tl.core))
    if modules not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(modules)
    return self.rewrite()(*args, **kwargs)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = interpreter.interpreter_semantic

    def new_member(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, new_member)


_builtins: dict[Any, list[str]] = {}


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    names = _builtins.get(package)
    if names is None:
        names = _builtins[package] = [n for n, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
    for name in names:
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            _patch_attr(package, name, member, builder, scope)


INTEGERS = frozenset(tl.core.dtype.SINT_TYPES + tl.core.dtype.UINT_TYPES)


def _np_dtype_by_name(plain: Any) -> Any:
    known: dict[str, Any] = {}

    def np_dtype(triton_type: Any) -> Any:
        found = known.get(triton_type.name)
        if found is None:
            found = known[triton_type.name] = plain(triton_type)
        return found

    return np_dtype


def _same_type(self: Any, other: Any) -> bool:
    if self is other:
        return True
    other = tl.core._unwrap_if_constexpr(other)
    return isinstance(other, tl.core.dtype) and self.name == other.name


def _unwrap(plain: Any) -> Any:
    constexpr, bare = tl.core.constexpr, (int, tl.core.dtype, float, bool, tl.core.block_type, tl.tensor)

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in bare else plain(value)

    return unwrap


@cache
def _shape(shape: tuple[int, ...]) -> tuple[Any, Any, int]:
    """Of a tensor's shape: itself and as constants, and its size. Wrong ones are refused as the original refuses them."""
    constants = tl.core.tuple([tl.core.constexpr(n) for n in shape])
    return tl.core.tuple(list(shape)), constants, validate_block_shape(list(shape))


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    numbers = tuple([getattr(n, "value", n) for n in getattr(shape, "values", shape)])
    if not numbers:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, _, self.numel = _shape(numbers)
    self.name = f"<{numbers}, {element_ty.name}>"


def _same_block(self: Any, other: Any) -> bool:
    return self is other or (isinstance(other, tl.core.block_type) and self.name == other.name)


_blocks: dict[tuple[str, Any], Any] = {}


def _block(element: Any, shape: Any) -> Any:
    key = (element.name, tuple(shape.values))
    found = _blocks.get(key)
    if found is None:
        found = _blocks[key] = tl.core.block_type(element, shape)
    return found


ONE = tl.core.constexpr(1)
NO_SHAPE = tl.core.tuple([])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        _, self.shape, numel = _shape(tuple(type.shape.values))
        self.numel = tl.core.constexpr(numel)
    else:
        self.shape, self.numel = NO_SHAPE, ONE


def _keep_types(plain: Any) -> Any:
    known: dict[tuple[Any, ...], Any] = {}

    def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, divides)
        found = known.get(key)
        if found is None:
            found = known[key] = plain(self, a, a_is_scalar, b, b_is_scalar, divides)
        return found

    return computation_type


def _quick_broadcast(plain: Any) -> Any:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.is_block(), rhs.type.is_block()
        if not left and not right:
            return lhs, rhs
        if left and right:
            return (lhs, rhs) if lhs.type.shape.values == rhs.type.shape.values else plain(self, lhs, rhs)
        return (lhs, _splat(rhs, lhs.type.shape)) if left else (_splat(lhs, rhs.type.shape), rhs)

    return broadcast


def _splat(value: Any, shape: Any) -> Any:
    data = np.empty(shape.values, value.handle.data.dtype)
    data[...] = value.handle.data
    return tl.tensor(TensorHandle(data, value.dtype), _block(value.dtype, shape))


def _quick_binary(plain: Any) -> Any:
    """Operands of one type, or a number beside a tensor whose type it takes; the rest as before."""

    def check(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        if named.get("div_or_mod", len(flags) > 3 and flags[3]):
            return plain(self, lhs, rhs, *flags, **named)
        left, right = type(lhs), type(rhs)
        if left is tl.tensor and right is tl.tensor:
            if lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        elif left is tl.tensor and _takes_type(right, rhs, lhs.dtype.name):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        elif right is tl.tensor and _takes_type(left, lhs, rhs.dtype.name):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return plain(self, lhs, rhs, *flags, **named)

    return check


def _takes_type(kind: type, number: Any, name: str) -> bool:
    if kind is int:
        return name in ("int32", "int64", "fp32") and -(2**31) <= number < 2**31
    return kind is float and name == "fp32"


def _quick_cast(plain: Any) -> Any:
    def cast(self: Any, value: Any, to: Any, fp_downcast_rounding: Any = None) -> Any:
        return value if value.dtype is to.scalar else plain(self, value, to, fp_downcast_rounding)

    return cast


def _keep_constants(plain: Any) -> Any:
    known: dict[tuple[Any, ...], Any] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (value.hex() if isinstance(value, float) else value, type(value), dtype.name)  # -0.0 is not 0.0
        found = known.get(key)
        if found is None:
            found = known[key] = plain(self, value, dtype)
            found.handle.data.flags.writeable = False
        return found

    return scalar_constant


def _refuse_overflow(self: Any, lhs: Any, rhs: Any, op: Any) -> None:
    if lhs.dtype.int_bitwidth >= 64 or lhs.dtype.name == "int1":
        return
    exact = OVERFLOW_OPS[op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    low, high = lhs.dtype.get_int_min_value(), lhs.dtype.get_int_max_value()
    if exact.size and not (low <= exact.min() and exact.max() <= high):
        raise OverflowError(f"{op.__name__} of {lhs.dtype}: {exact.min()} to {exact.max()}")
