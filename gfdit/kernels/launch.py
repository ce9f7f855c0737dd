"""Starting kernels: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

import functools
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import triton

from gfdit.kernels.compiled import Variant, compile_variant, constant_names, kernel_name

if TYPE_CHECKING:
    from gfdit.kernels.members import Members

logger = logging.getLogger("gfdit.kernels")

# Enqueues ``num_programs`` programs with all arguments, the constants last.
Enqueue = Callable[[int, tuple[object, ...]], None]
Load = Callable[[Sequence[Variant]], list[Enqueue]]
# Enqueues a prepared kernel with the rest of its arguments.
Launch = Callable[..., None]


class LaunchShape(NamedTuple):
    """Of a program on a GPU: its warps, and the bytes it copies in a turn."""

    num_warps: int
    turn_bytes: int = 0


# Nothing but words: a wait holds as little of a multiprocessor as can be.
ONE_WARP = LaunchShape(1)
# Four flagged pairs of each thread: as many as it waits for at a time.
SMALL = LaunchShape(4)
# Sixteen 16-byte accesses of each thread on their way at a time, so that 16 programs keep the 1 MiB in flight that
# a link of 450 GB/s with some 2 microseconds from load to store wants. A program has all of a multiprocessor: 255
# registers for each thread. More warps would have fewer, and what a thread holds besides the copy is the same.
BULK = LaunchShape(8, 64 << 10)
# Strided rows of several tensors at once: half of that, for the registers of their addresses.
ROWS = LaunchShape(8, 32 << 10)
# Tiles of 16 KiB, three in flight in shared memory, moved by few threads.
TILED = LaunchShape(4, 16 << 10)
# The interpreter pays by the operation, not by the byte.
HOST_BLOCK_BYTES = 1 << 18


def block_bytes(shape: LaunchShape, ptx: bool) -> int:
    return shape.turn_bytes if ptx else HOST_BLOCK_BYTES


def combined(values: Iterable[int]) -> int:
    """All addresses and strides combined with "or": as aligned as the least aligned of them."""
    return functools.reduce(operator.or_, values, 0)


WIDTHS = (16, 4, 1)
# Of what is rarely unaligned.
FEW_WIDTHS = (16, 1)


def common_width(alignment: int, widths: tuple[int, ...] = WIDTHS) -> int:
    """The widest access in bytes that addresses and strides allow, which were ``combined``."""
    return next(width for width in widths if not alignment % width)


class Launcher:
    """The compiled kernels of a process, ready to be enqueued without Triton's own launch, which binds, looks at
    and hashes every argument.

    ``late``: variants first met after a warm-up. With ``strict`` it raises RuntimeError instead. Threads may
    prepare and launch at the same time.
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

    def prepare(
        self,
        kernel: Any,
        num_programs: int,
        shape: LaunchShape,
        tuples: tuple[tuple[int, ...], ...] = (),
        **constants: Any,
    ) -> Launch:
        """Ready to be launched again and again, with all arguments but ``constants``, the ``constexpr`` ones.

        ``tuples``: see ``Variant``. Raises RuntimeError for a kernel that is neither compiled for a GPU nor
        interpreted.
        """
        values = tuple(constants.values())
        enqueue = self._ready.get((id(kernel), shape.num_warps, values, tuples))
        if enqueue is None:
            if tuple(constants) != constant_names(kernel):
                raise TypeError(f"{kernel_name(kernel)} takes its constants in the order {constant_names(kernel)}")
            enqueue = self._meet(Variant(kernel, tuple(constants.items()), shape.num_warps, tuples))

        def launch(*arguments: object) -> None:
            enqueue(num_programs, arguments + values)

        return launch

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
    # Not the kernel: Triton's hash of it settles its name, which is too early (see ``name_kernels``).
    return id(variant.kernel), variant.num_warps, tuple(value for _, value in variant.constants), variant.tuples


def plan_launch(
    kernel: Any,
    members: Members,
    num_programs: int,
    shape: LaunchShape,
    *,
    alignment: int = 0,
    widths: tuple[int, ...] = WIDTHS,
    tuples: tuple[tuple[int, ...], ...] = (),
    after: tuple[object, ...] = (),
    **constants: Any,
) -> Launch:
    """Launches of ``kernel``, given a label and addresses: what it takes behind the members and before ``after``.

    ``alignment``: what besides addresses decides how wide accesses are, ``combined``. With ``tuples`` addresses
    are pairs. ``constants``: those that ``members``, ``shape`` and the addresses do not say.
    """
    known = {
        "GROUP": members.vector_size(shape.num_warps),
        "PACKED": members.packed,
        "BLOCK": block_bytes(shape, members.ptx),
        "PTX": members.ptx,
        **constants,
    }

    @functools.cache
    def ready(width: int) -> Launch:
        values = known | {"WIDTH": width}
        ordered = {name: values[name] for name in constant_names(kernel)}
        return launcher.prepare(kernel, num_programs, shape, tuples, **ordered)

    told = members.told()

    def launch(label: int, *addresses: int) -> None:
        together = alignment
        for address in addresses:
            together |= address
        ready(common_width(together, widths))(told(label), *addresses, *after)

    def launch_pairs(label: int, pairs: Sequence[tuple[int, int]]) -> None:
        together = alignment
        for source, target in pairs:
            together |= source | target
        ready(common_width(together, widths))(told(label), tuple(pairs), *after)

    return launch_pairs if tuples else launch


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
