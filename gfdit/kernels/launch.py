"""Starting kernels: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton

from gfdit.kernels.compiled import Variant, compile_variant, constant_names, kernel_name

logger = logging.getLogger("gfdit.kernels")

# Enqueues ``num_programs`` programs with all arguments, the constants last.
Enqueue = Callable[[int, tuple[object, ...]], None]
Load = Callable[[Sequence[Variant]], list[Enqueue]]

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

    def __init__(self, load: Load | None = None, *, strict: bool = False) -> None:
        """``load`` compiles variants for the current GPU."""
        self.strict = strict
        self.late: list[Variant] = []
        self._load = load or load_on_gpu
        self._ready: dict[tuple[object, ...], Enqueue] = {}
        self._is_warm = False
        self._lock = threading.Lock()

    def warm_up(self, variants: Iterable[Variant]) -> int:
        """Compile and load these for the current GPU; from now on others are late. Returns how many were new."""
        with self._lock:
            new = {key: variant for variant in variants if (key := _key_of(variant)) not in self._ready}
            if new:
                self._ready.update(zip(new, self._prepare(list(new.values())), strict=True))
            self._is_warm = True
        return len(new)

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
            if tuple(constants) != constant_names(kernel):
                raise TypeError(f"{kernel_name(kernel)} takes its constants in the order {constant_names(kernel)}")
            enqueue = self._meet(Variant(kernel, tuple(constants.items()), num_warps, tuples))
        enqueue(num_programs, (*arguments, *values))

    def _meet(self, variant: Variant) -> Enqueue:
        with self._lock:
            key = _key_of(variant)
            if key not in self._ready:
                if self._is_warm:
                    if self.strict:
                        raise RuntimeError(f"not compiled before serving: {variant}")
                    self.late.append(variant)
                    logger.warning("not compiled before serving: %s", variant)
                (self._ready[key],) = self._prepare([variant])
            return self._ready[key]

    def _prepare(self, variants: Sequence[Variant]) -> list[Enqueue]:
        if not all(dict(variant.constants)["PTX"] for variant in variants):
            return [_interpreted(variant) for variant in variants]
        return self._load(variants)


def _key_of(variant: Variant) -> tuple[object, ...]:
    return variant.kernel, variant.num_warps, tuple(value for _, value in variant.constants), variant.tuples


def launch(
    kernel: Any, num_programs: int, arguments: tuple[object, ...], *, num_warps: int = 4, **constants: Any
) -> None:
    """Enqueue ``kernel`` on the current stream; ``constants`` are its ``constexpr`` parameters, in their order.

    Raises RuntimeError for a kernel that is neither compiled for a GPU nor interpreted.
    """
    launcher.launch(kernel, num_programs, arguments, num_warps, constants)


def load_on_gpu(variants: Sequence[Variant]) -> list[Enqueue]:
    """Compile for the current GPU, several at a time, and load. Never run on a GPU."""
    driver = triton.runtime.driver.active
    target, device = driver.get_current_target(), driver.get_current_device()
    try:
        with ThreadPoolExecutor(min(len(variants), os.cpu_count() or 1)) as pool:
            compiled = list(pool.map(lambda variant: compile_variant(variant, target), variants))
        return [_direct(kernel, driver.get_current_stream, device) for kernel in compiled]
    except (AttributeError, TypeError) as error:
        # Another Triton than the ones known: slower, and it may compile while serving, but it is its public way.
        logger.warning("kernels go through Triton's own launch, %s being unknown: %s", triton.__version__, error)
        return [_through_triton(variant) for variant in variants]


def _direct(compiled: Any, current_stream: Callable[[int], int], device: int) -> Enqueue:
    # The first look at ``run`` loads the kernel into the current context.
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def enqueue(num_programs: int, arguments: tuple[object, ...]) -> None:
        # No launch metadata, no hooks.
        run(num_programs, 1, 1, current_stream(device), function, metadata, None, None, None, *arguments)

    return enqueue


def _through_triton(variant: Variant) -> Enqueue:
    num_warps = variant.num_warps
    return lambda num_programs, arguments: variant.kernel[(num_programs,)](*arguments, num_warps=num_warps)


def _interpreted(variant: Variant) -> Enqueue:
    if isinstance(variant.kernel, triton.JITFunction):
        raise RuntimeError(
            "kernels are not interpreted: without a GPU, set TRITON_INTERPRET=1 before triton is imported"
        )
    return lambda num_programs, arguments: variant.kernel[(num_programs,)](*arguments)


# Compiled code belongs to the process, as it does in Triton.
launcher = Launcher()


def common_width(*values: int) -> int:
    """The widest access (16, 4 or 1 bytes) that all these addresses and strides allow."""
    combined = 0
    for value in values:
        combined |= value
    return 16 if combined % 16 == 0 else 4 if combined % 4 == 0 else 1
