"""A kernel with its constants, compiled ahead of its first launch: no GPU is needed to compile, only to load.

Run-time parameters have fixed types, whatever values come: everything is a 64-bit integer, or a pointer to such
(``_TOLD``). Triton's own launch would look at the values (zero, one,
divisible by 16, 32 bits wide) and compile another variant for some of them, in the middle of serving.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from gfdit.kernels.members import Told

# Of the parameter ``members``.
_TOLD = Told(*["i64"] * len(Told._fields))._replace(lane="*i64", table="*i64")
_TUPLES = ("addresses", "strides")
# Few programs run at a time, so one may have all registers of a multiprocessor, and a thread as many as there are;
# left alone the assembler may spill to use fewer.
_REGISTERS, _MAX_REGISTERS = 65536, 255


def launched(function: Callable[..., None]) -> Any:
    """``triton.jit`` of a kernel: no value of a run-time parameter makes Triton compile another variant."""
    types = function.__annotations__
    names = inspect.signature(function).parameters
    return triton.jit(function, do_not_specialize=[n for n in names if "constexpr" not in str(types.get(n))])


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of a kernel.

    ``constants``: its ``constexpr`` parameters in their order. ``tuples``: for each parameter that is a tuple of
    tuples of integers, the lengths of the inner ones.
    """

    kernel: Any
    constants: tuple[tuple[str, object], ...]
    num_warps: int = 4
    tuples: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, kernel: Any, *, num_warps: int = 4, tuples: tuple[tuple[int, ...], ...] = (), **constants: object
    ) -> Variant:
        """With constants in any order. Raises TypeError if one is missing or unknown."""
        names = constant_names(kernel)
        if set(names) != set(constants):
            raise TypeError(f"{kernel_name(kernel)} takes the constants {names}, got {tuple(constants)}")
        return cls(kernel, tuple((name, constants[name]) for name in names), num_warps, tuples)

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants)
        shape = f", tuples={self.tuples}" if self.tuples else ""
        return f"{kernel_name(self.kernel)}({constants}, num_warps={self.num_warps}{shape})"


def kernel_name(kernel: Any) -> str:
    return kernel.fn.__name__


def constant_names(kernel: Any) -> tuple[str, ...]:
    """Names of the ``constexpr`` parameters of a kernel, compiled or interpreted, in their order."""
    annotations = kernel.fn.__annotations__
    return tuple(name for name in kernel.arg_names if "constexpr" in str(annotations.get(name, "")))


def signature(variant: Variant) -> Mapping[str, Any]:
    """Types of all parameters as Triton names them."""
    types: dict[str, Any] = {}
    tuples = iter(variant.tuples)
    for parameter in variant.kernel.params:
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
        elif parameter.name == "members":
            types[parameter.name] = _TOLD
        elif parameter.name in _TUPLES:
            types[parameter.name] = tuple(("i64",) * length for length in next(tuples))
        else:
            types[parameter.name] = parameter.annotation_type or "i64"
    return types


@functools.cache
def name_kernels() -> None:
    """Settle what kernels are called in Triton's cache on disk, in one order in all processes.

    The name of a kernel depends on which others were named before it. Processes that name them in other orders
    compile again what they could share.
    """
    from gfdit.kernels.variants import all_variants  # which is made of this module

    for variant in all_variants(2, ptx=True):
        if isinstance(variant.kernel, triton.JITFunction):  # else it is interpreted
            _ = variant.kernel.cache_key


def compile_variant(variant: Variant, target: GPUTarget) -> Any:
    """Triton's ``CompiledKernel`` for ``target``, for example ``GPUTarget("cuda", 90, 32)``."""
    name_kernels()
    source = triton.compiler.ASTSource(variant.kernel, signature(variant), dict(variant.constants))
    registers = min(_MAX_REGISTERS, _REGISTERS // (32 * variant.num_warps))
    options = {"num_warps": variant.num_warps, "maxnreg": registers}
    return triton.compile(source, target=target, options=options)
