"""The Triton interpreter, made fast enough for thousands of collectives. Import it in a rank process, once.

Nothing here changes what a kernel computes: types are looked up instead of derived again for every operation, what
numpy broadcasts by itself is not copied before, and a rank that waits gives up its core.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

# Triton decides when it is imported whether it compiles or interprets.
assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"
os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.language.semantic import TritonSemantic  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.interpreter import TensorHandle  # noqa: E402

_get_np_dtype = interpreter._get_np_dtype
_check_binary = TritonSemantic.binary_op_type_checking_impl
_scalar_constant = TritonSemantic.scalar_constant
_cast = TritonSemantic.cast
_patch_attr = interpreter._patch_attr
_np_dtypes: dict[str, Any] = {}


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function called by another: the language is patched already (every call would do it again)."""
    return self.rewrite()(*args, **kwargs)


def _known_np_dtype(tt_dtype: Any) -> Any:
    dtype = _np_dtypes.get(tt_dtype.name)
    if dtype is None:
        dtype = _np_dtypes[tt_dtype.name] = _get_np_dtype(tt_dtype)
    return dtype


@functools.cache
def _shape(extents: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(functools.reduce(int.__mul__, extents, 1)), tl.tuple([tl.constexpr(e) for e in extents])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = _shape(tuple(type.shape) if type.is_block() else ())


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    extents = tuple([extent.value if isinstance(extent, tl.constexpr) else extent for extent in shape])
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _block_of(extents, element_ty.name)


@functools.cache
def _block_of(extents: tuple[int, ...], element_name: str) -> tuple[Any, int, str]:
    return tl.tuple(extents), functools.reduce(int.__mul__, extents), f"<{extents}, {element_name}>"


def _known_scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
    """Nobody changes a tensor in place."""
    if type(value) is not int or dtype is None or not dtype.is_int():
        return _scalar_constant(self, value, dtype)
    key = value, dtype.name
    constant = _constants.get(key)
    if constant is None:
        constant = _constants[key] = _scalar_constant(self, value, dtype)
    return constant


_constants: dict[tuple[int, str], Any] = {}


def _cast_of_integers(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
    source, target = input.dtype.name, dst_ty.scalar
    if source in _INTEGERS and target.name in _INTEGERS:
        if source == target.name:
            return input
        if target.name != "int1":
            data = input.handle.data.astype(_known_np_dtype(target))
            return tl.tensor(TensorHandle(data, target), _with_element(input.type, target))
    return _cast(self, input, dst_ty, fp_downcast_rounding)


def _with_element(type: Any, element: Any) -> Any:
    return tl.block_type(element, type.shape) if type.is_block() else element


def _check_operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """For integers, for pointers to which integers are added, and where a number fits the other operand's type."""
    if type(rhs) is int and isinstance(lhs, tl.tensor):
        if _takes(lhs, rhs):
            return _of_one_shape(self, lhs, self.scalar_constant(rhs, lhs.dtype))
        if allow_lhs_ptr and lhs.dtype.is_ptr():
            return _of_one_shape(self, lhs, self.to_tensor(rhs))
    elif type(lhs) is int and isinstance(rhs, tl.tensor):
        if _takes(rhs, lhs):
            return _of_one_shape(self, self.scalar_constant(lhs, rhs.dtype), rhs)
    elif arithmetic_check and isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
        one, other = lhs.dtype.name, rhs.dtype.name
        if one in _INTEGERS and other in _INTEGERS:
            if one != other:
                common = _common_type(self, lhs.dtype, rhs.dtype, div_or_mod)
                lhs, rhs = self.cast(lhs, common), self.cast(rhs, common)
            return _of_one_shape(self, lhs, rhs)
        if allow_lhs_ptr and other in _INTEGERS and lhs.dtype.is_ptr():
            return _of_one_shape(self, lhs, rhs)
    return _check_binary(
        self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check=arithmetic_check, div_or_mod=div_or_mod
    )


_INTEGERS = frozenset((*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES))
_WIDE_INTEGERS = frozenset(("int32", "uint32", "int64", "uint64"))


def _takes(tensor: Any, number: int) -> bool:
    return 0 <= number < 2**31 and tensor.dtype.name in _WIDE_INTEGERS


def _common_type(semantic: Any, one: Any, other: Any, div_or_mod: bool) -> Any:
    key = one.name, other.name, div_or_mod
    common = _common_types.get(key)
    if common is None:
        common = _common_types[key] = semantic.computation_type_impl(one, False, other, False, div_or_mod)
    return common


_common_types: dict[tuple[str, str, bool], Any] = {}


def _of_one_shape(semantic: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """By their types. The one value of a scalar beside a block stays one value: numpy does the rest."""
    if lhs.type.is_block():
        if not rhs.type.is_block():
            return lhs, tl.tensor(rhs.handle, tl.block_type(rhs.dtype, lhs.type.shape))
        if lhs.type.shape is not rhs.type.shape:  # of equal extents there is one
            return semantic.broadcast_impl_value(lhs, rhs)
    elif rhs.type.is_block():
        return tl.tensor(lhs.handle, tl.block_type(lhs.dtype, rhs.type.shape)), rhs
    return lhs, rhs


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
    if output.dtype is not lhs.data.dtype and not interpreter._validate_np_data_size(output, dtype):
        output = output.astype(_known_np_dtype(dtype))
    return TensorHandle(output, dtype)


def _patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """What a kernel calls by that name, without what stands between it and the language's own function."""
    if member.__code__ is not _BUILTIN_CODE:
        _patch_attr(obj, name, member, builder, scope)
        return
    function = member.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


_BUILTIN_CODE = tl.core.builtin(lambda: None).__code__


# For good, and for both names under which device functions see the language.
_everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
interpreter._patch_attr = _patch_builtin
interpreter._patch_lang(_everything)
interpreter.InterpretedFunction.__call__ = _call
interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
interpreter._get_np_dtype = _known_np_dtype
tl.tensor.__init__ = _init_tensor
tl.block_type.__init__ = _init_block_type
TensorHandle.__post_init__ = lambda self: None  # it checks the interpreter
TritonSemantic.binary_op_type_checking_impl = _check_operands
TritonSemantic.scalar_constant = _known_scalar_constant
TritonSemantic.cast = _cast_of_integers
interpreter.InterpreterBuilder.binary_op = _binary_op


_rmw = interpreter.InterpreterBuilder.create_atomic_rmw


def _polling_rmw(self: Any, operation: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    """A rank that waits gives its core to those it waits for: there are fewer cores than ranks."""
    if operation == _ADD and sem in _POLLS:
        time.sleep(_POLL_S)
    return _rmw(self, operation, ptr, value, mask, sem, scope)


_POLL_S = 5e-5
_ADD = interpreter._ir.ATOMIC_OP.ADD
_POLLS = (interpreter._ir.MEM_SEMANTIC.ACQUIRE, interpreter._ir.MEM_SEMANTIC.RELAXED)
interpreter.InterpreterBuilder.create_atomic_rmw = _polling_rmw
