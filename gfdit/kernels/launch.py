"""Starting kernels: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import triton

from gfdit.kernels.compiled import Variant, compile_variant, constant_names, kernel_name

logger = logging.getLogger("gfdit.kernels")

# Enqueues ``num_programs`` programs with all arguments, the constants last.
Enqueue = Callable[[int, tuple[object, ...]], None]

# Bytes a program copies in a turn. On a GPU: four 16-byte accesses of each of 128 threads.
GPU_BLOCK_BYTES = 8192
# The interpreter pays by the operation, not by the byte.
HOST_BLOCK_BYTES = 1 << 18


def block_bytes(ptx: bool) -> int:
    return GPU_BLOCK_BYTES if ptx else HOST_BLOCK_BYTES


class Launcher:
    """The compiled kernels of a process, ready to be enqueued without Triton's own launch, which binds, looks at
    and hashes every argument.

    ``late``: variants first met after a warm-up. With ``strict`` such a launch raises RuntimeError instead.
    Threads may launch at the same time.
    """

    def __init__(self, load: Callable[[Variant], Enqueue] | None = None, *, strict: bool = False) -> None:
        """``load`` compiles a variant for the current GPU."""
        self.strict = strict
        self.late: list[Variant] = []
        self._load = load or load_on_gpu
        self._ready: dict[tuple[object, ...], Enqueue] = {}
        self._is_warm = False
        self._lock = threading.Lock()

    def warm_up(self, variants: Iterable[Variant]) -> int:
        """Compile and load these for the current GPU; from now on others are late. Returns how many were new."""
        num_ready = len(self._ready)
        for variant in variants:
            constants = tuple(value for _, value in variant.constants)
            key = (variant.kernel, variant.num_warps, constants, variant.tuples)
            if key not in self._ready:
                self._ready[key] = self._prepare(variant)
        self._is_warm = True
        return len(self._ready) - num_ready

    def launch(
        self,
        kernel: Any,
        num_programs: int,
        arguments: tuple[object, ...],
        num_warps: int,
        constants: dict[str, Any],
    ) -> None:
        """See the function ``launch``."""
        tuples = tuple([tuple([len(row) for row in value]) for value in arguments if type(value) is tuple])
        values = tuple(constants.values())
        enqueue = self._ready.get((kernel, num_warps, values, tuples))
        if enqueue is None:
            enqueue = self._meet(kernel, num_warps, tuples, constants)
        enqueue(num_programs, (*arguments, *values))

    def _meet(self, kernel: Any, num_warps: int, tuples: tuple[tuple[int, ...], ...], constants: dict) -> Enqueue:
        if tuple(constants) != constant_names(kernel):
            raise TypeError(f"{kernel_name(kernel)} takes its constants in the order {constant_names(kernel)}")
        variant = Variant(kernel, tuple(constants.items()), num_warps, tuples)
        with self._lock:
            if self._is_warm:
                if self.strict:
                    raise RuntimeError(f"not compiled before serving: {variant}")
                self.late.append(variant)
                logger.warning("not compiled before serving: %s", variant)
            enqueue = self._prepare(variant)
            self._ready[kernel, num_warps, tuple(constants.values()), tuples] = enqueue
        return enqueue

    def _prepare(self, variant: Variant) -> Enqueue:
        if dict(variant.constants)["PTX"]:
            return self._load(variant)
        if isinstance(variant.kernel, triton.JITFunction):
            raise RuntimeError(
                "kernels are not interpreted: without a GPU, set TRITON_INTERPRET=1 before triton is imported"
            )
        return lambda num_programs, arguments: variant.kernel[(num_programs,)](*arguments)


# Compiled code belongs to the process, as it does in Triton.
launcher = Launcher()


def launch(
    kernel: Any, num_programs: int, arguments: tuple[object, ...], *, num_warps: int = 4, **constants: Any
) -> None:
    """Enqueue ``kernel`` on the current stream; ``constants`` are its ``constexpr`` parameters, in their order.

    Raises RuntimeError for a kernel that is neither compiled for a GPU nor interpreted.
    """
    launcher.launch(kernel, num_programs, arguments, num_warps, constants)


def load_on_gpu(variant: Variant) -> Enqueue:
    """Compile for the current GPU and load. Never run on a GPU."""
    device = triton.runtime.driver.active.get_current_device()
    try:
        compiled = compile_variant(variant, triton.runtime.driver.active.get_current_target())
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    except (AttributeError, TypeError) as error:
        # Another Triton than the ones known: slower, and it may compile while serving, but it is its public way.
        logger.warning("kernels go through Triton's own launch, %s being unknown: %s", triton.__version__, error)
        constants, num_warps = dict(variant.constants), variant.num_warps
        num_arguments = len(variant.kernel.arg_names) - len(constants)
        return lambda num_programs, arguments: variant.kernel[(num_programs,)](
            *arguments[:num_arguments], **constants, num_warps=num_warps
        )
    current_stream = triton.runtime.driver.active.get_current_stream

    def enqueue(num_programs: int, arguments: tuple[object, ...]) -> None:
        # No launch metadata, no hooks.
        run(num_programs, 1, 1, current_stream(device), function, metadata, None, None, None, *arguments)

    return enqueue


def common_width(*values: int) -> int:
    """The widest access (16, 4 or 1 bytes) that all these addresses and strides allow."""
    combined = 0
    for value in values:
        combined |= value
    return 16 if combined % 16 == 0 else 4 if combined % 4 == 0 else 1
