"""Every variant that a launch may need: compiled at start, so that nothing compiles while serving.

A test compares this list with what was launched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from gfdit.kernels.barrier import barrier
from gfdit.kernels.compiled import Variant
from gfdit.kernels.launch import block_bytes
from gfdit.kernels.low_latency import PAYLOAD_WIDTHS, tile_pairs
from gfdit.kernels.low_latency_all_reduce import DTYPES, low_latency_all_reduce
from gfdit.kernels.low_latency_broadcast import low_latency_pull, low_latency_push
from gfdit.kernels.low_latency_exchange import low_latency_exchange
from gfdit.kernels.members import MAX_PACKED
from gfdit.kernels.multicast_all_gather import multicast_all_gather
from gfdit.kernels.multicast_broadcast import multicast_pull, multicast_push
from gfdit.kernels.pull_exchange import DIRECT_PULL, DIRECT_PUSH, STAGED_PULL, pull_exchange
from gfdit.kernels.push_exchange import push_exchange
from gfdit.kernels.recv import recv
from gfdit.kernels.send import send
from gfdit.kernels.tma_copy import tile_bytes
from gfdit.kernels.ulysses_exchange import ulysses_exchange

# Widths of ``launch.common_width``.
WIDTHS = (16, 4, 1)
# Attention exchanges query, key and value together where their shapes agree, else some of them alone.
_HEAD_TENSORS = (1, 2, 3)
_ROW_FIELDS = 7


def all_variants(world_size: int, ptx: bool, hopper: bool = True) -> Iterator[Variant]:
    """What lanes of a heap of ``world_size`` ranks may launch.

    ``ptx``: on a GPU. ``hopper``: which has tiles and multicast, or there is none.
    """
    for group, packed in vector_blocks(world_size):
        yield from _group_variants(group, packed, ptx, hopper)
    for packed, width in itertools.product((True, False), WIDTHS):
        for kernel in (recv, multicast_pull) if hopper else (recv,):
            yield Variant.of(kernel, PACKED=packed, WIDTH=width, BLOCK=block_bytes(ptx), PTX=ptx)
    for group, packed in group_blocks(world_size):
        yield from _low_latency_variants(group, packed, ptx)


def _group_variants(group: int, packed: bool, ptx: bool, hopper: bool) -> Iterator[Variant]:
    group_fields: dict[str, Any] = {"GROUP": group, "PACKED": packed, "PTX": ptx}
    yield Variant.of(barrier, num_warps=1, **group_fields)
    for width in WIDTHS:
        common = group_fields | {"WIDTH": width, "BLOCK": block_bytes(ptx)}
        yield Variant.of(push_exchange, TMA=False, **common)
        for kind in (STAGED_PULL, DIRECT_PULL, DIRECT_PUSH):
            yield Variant.of(pull_exchange, KIND=kind.value, **common)
        for kernel in (send, multicast_all_gather, multicast_push) if hopper else (send,):
            yield Variant.of(kernel, **common)
        for gather in (False, True):
            for num_tensors in (1,) if gather else _HEAD_TENSORS:
                tuples = ((_ROW_FIELDS,) * num_tensors,)
                yield Variant.of(ulysses_exchange, tuples=tuples, GATHER=gather, NUM_PROGRAMS=1, **common)
    if hopper:
        yield Variant.of(push_exchange, TMA=True, WIDTH=16, BLOCK=tile_bytes(ptx), **group_fields)


def _low_latency_variants(group: int, packed: bool, ptx: bool) -> Iterator[Variant]:
    for width in PAYLOAD_WIDTHS:
        common: dict[str, Any] = {"WIDTH": width, "BLOCK": tile_pairs(group, ptx), "PTX": ptx}
        yield Variant.of(low_latency_exchange, GROUP=group, PACKED=packed, **common)
        yield Variant.of(low_latency_push, GROUP=group, PACKED=packed, **common)
        yield Variant.of(low_latency_pull, PACKED=packed, **common)
        for dtype in DTYPES.values() if packed else ():
            yield Variant.of(low_latency_all_reduce, GROUP=group, DTYPE=dtype, **common)


def vector_blocks(world_size: int) -> list[tuple[int, bool]]:
    """(GROUP, PACKED) for kernels that use ``Members.vector_size``, which hides the size of small groups."""
    return list(dict.fromkeys((max(size, 32), packed) for size, packed in group_blocks(world_size)))


def group_blocks(world_size: int) -> list[tuple[int, bool]]:
    """(GROUP, PACKED) of every group of a world: powers of two; any group may come with a table."""
    largest = 1 << (world_size - 1).bit_length()
    sizes = [1 << power for power in range(largest.bit_length())]
    return [(size, packed) for size in sizes for packed in (True, False) if not packed or size <= MAX_PACKED]
