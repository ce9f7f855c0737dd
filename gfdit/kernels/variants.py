"""Every variant that a launch may need: compiled at start, so that nothing compiles while serving.

A test compares this list with what was launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gfdit.kernels.barrier import barrier
from gfdit.kernels.compiled import Variant
from gfdit.kernels.direct_exchange import direct_exchange
from gfdit.kernels.gate import gate
from gfdit.kernels.launch import BULK, FEW_WIDTHS, ONE_WARP, ROWS, SMALL, TILED, WIDTHS, LaunchShape, block_bytes
from gfdit.kernels.low_latency import PAYLOAD_WIDTHS, tile_pairs
from gfdit.kernels.low_latency_all_reduce import DTYPES, low_latency_all_reduce
from gfdit.kernels.low_latency_broadcast import low_latency_pull, low_latency_push
from gfdit.kernels.low_latency_exchange import low_latency_exchange
from gfdit.kernels.members import MAX_PACKED, block_size, vector_size
from gfdit.kernels.multicast_all_gather import multicast_all_gather
from gfdit.kernels.multicast_broadcast import multicast_pull, multicast_push
from gfdit.kernels.push_exchange import push_exchange
from gfdit.kernels.recv import recv
from gfdit.kernels.send import send
from gfdit.kernels.ulysses_exchange import Strides, ulysses_exchange

# Attention exchanges query, key and value together where their shapes agree, else some of them alone.
_HEAD_TENSORS = (1, 2, 3)


def all_variants(world_size: int, ptx: bool, hopper: bool = True) -> Iterator[Variant]:
    """What lanes of a heap of ``world_size`` ranks may launch.

    ``ptx``: on a GPU. ``hopper``: which has tiles and multicast, or there is none.
    """

    sizes = sorted({block_size(size) for size in range(1, world_size + 1)})
    # Members come by value, or in a table if there are many; and in a table if their parts differ.
    by_value = {"PACKED": True}
    ways = [by_value] if sizes[0] <= MAX_PACKED else []
    ways += [{"PACKED": False}] if world_size > MAX_PACKED else []
    with_parts = [*ways, {"PACKED": False}] if world_size <= MAX_PACKED else ways

    def variants(
        kernel: Any, shape: LaunchShape, ways: Sequence[dict[str, Any]], **constants: Any
    ) -> Iterator[Variant]:
        """In all ``ways``, for vectors of all sizes that there may be."""
        if "BLOCK" not in constants and shape.turn_bytes:
            constants["BLOCK"] = block_bytes(shape, ptx)
        tuples = constants.pop("tuples", ())
        for way in ways:
            for group in sorted({vector_size(size, shape.num_warps, ptx) for size in sizes}):
                yield Variant.of(
                    kernel, num_warps=shape.num_warps, tuples=tuples, GROUP=group, **way, **constants, PTX=ptx
                )

    for kernel in (barrier, gate):
        yield from variants(kernel, ONE_WARP, ways)
    for way in with_parts:
        for width in WIDTHS if way is by_value else FEW_WIDTHS:
            yield from variants(push_exchange, BULK, [way], TMA=False, WIDTH=width)
            for pull in (False, True):
                yield from variants(direct_exchange, BULK, [way], PULL=pull, WIDTH=width)
        if hopper:
            yield from variants(push_exchange, TILED, [way], TMA=True, WIDTH=16)
    for width in WIDTHS:
        for kernel in (send, recv, *((multicast_all_gather, multicast_push, multicast_pull) if hopper else ())):
            yield from variants(kernel, BULK, ways, WIDTH=width)
    for width in FEW_WIDTHS:
        for gather, num_tensors in ((True, 1), *((False, number) for number in _HEAD_TENSORS)):
            tuples = ((2,) * num_tensors, (len(Strides._fields),) * num_tensors)
            for direct in (False, True)[: 2 if width == 16 else 1]:
                yield from variants(
                    ulysses_exchange, ROWS, with_parts, tuples=tuples, GATHER=gather, DIRECT=direct, WIDTH=width
                )
    for size in sizes:
        for width in PAYLOAD_WIDTHS:
            its_way, common = [{"PACKED": size <= MAX_PACKED}], {"WIDTH": width, "BLOCK": tile_pairs(size, ptx)}
            yield from variants(low_latency_exchange, SMALL, its_way, SIZE=size, **common)
            yield from variants(low_latency_push, SMALL, its_way, SIZE=size, **common)
            yield from variants(low_latency_pull, SMALL, its_way, **common)
            for dtype in DTYPES.values() if size <= MAX_PACKED else ():
                yield from variants(low_latency_all_reduce, SMALL, [{}], SIZE=size, DTYPE=dtype, **common)
