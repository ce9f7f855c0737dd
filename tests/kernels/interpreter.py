"""The Triton interpreter, made fast enough for thousands of collectives. Import it in a rank process, once.

Nothing here changes what a kernel computes: types are looked up instead of derived again for every operation, and
a rank that waits gives up its core.
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

_get_np_dtype = interpreter._get_np_dtype
_check_binary = TritonSemantic.binary_op_type_checking_impl
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
    extents = tuple(extent.value if isinstance(extent, tl.constexpr) else extent for extent in shape)
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _block_of(extents, element_ty.name)


@functools.cache
def _block_of(extents: tuple[int, ...], element_name: str) -> tuple[Any, int, str]:
    return tl.tuple(extents), functools.reduce(int.__mul__, extents), f"<{extents}, {element_name}>"


def _check_binary_of_integers(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """Operands of one integer type, or an integer type and a small number, need no promotion."""
    if isinstance(lhs, tl.tensor) and lhs.dtype.is_int() and lhs.dtype.int_bitwidth >= 32:
        if type(rhs) is int and 0 <= rhs < 2**31:
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        if isinstance(rhs, tl.tensor) and lhs.type.name == rhs.type.name:
            return lhs, rhs
    return _check_binary(self, lhs, rhs, *args, **kwargs)


# For good, and for both names under which device functions see the language.
_everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
interpreter._patch_lang(_everything)
interpreter.InterpretedFunction.__call__ = _call
interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
interpreter._get_np_dtype = _known_np_dtype
tl.tensor.__init__ = _init_tensor
tl.block_type.__init__ = _init_block_type
TritonSemantic.binary_op_type_checking_impl = _check_binary_of_integers


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
