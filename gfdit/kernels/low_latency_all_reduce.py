"""Sum of small tensors over a group: everybody sends everything to everybody and adds it up in group order::

    token and pairs to all | await the pairs of all, add up in place

Half precision is added in float32 and rounded once, so every member gets the bits that ``OrderedSum`` would get.
Words and slots are those of ``gfdit.kernels.low_latency``, where it says why they are right. A program sends the
same elements that it sums, so it may write the sums over them.

Reference: ``gfdit.comm.reduction.OrderedSum``. Range: tensors of up to ``low_latency_bytes``, groups of up to
``MAX_PACKED`` ranks, dtypes in ``DTYPES``. Never run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.edges import EDGE_OBSERVED, edge_state, finish, low_latency_slot, open_edges, rank_at, usable
from gfdit.kernels.launch import SMALL, Launch, plan_launch
from gfdit.kernels.low_latency import (
    PAYLOAD_WIDTHS,
    await_free,
    await_pairs,
    first_pair,
    num_turns,
    pair_offsets,
    store_to_all,
    tile_pairs,
)
from gfdit.kernels.members import Members
from gfdit.kernels.memory import load_relaxed_block, word_pointer

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def plan(members: Members, num_elements: int, dtype: torch.dtype, *, num_programs: int) -> Launch:
    """One launch, given its label and the address of (elements,): they become the sum over the members.

    ``dtype`` is in ``DTYPES``.
    """
    return plan_launch(
        low_latency_all_reduce,
        members,
        num_programs,
        SMALL,
        alignment=num_elements * dtype.itemsize,
        widths=PAYLOAD_WIDTHS,
        after=(num_elements,),
        SIZE=members.block_size,
        DTYPE=DTYPES[dtype],
        BLOCK=tile_pairs(members.block_size, members.ptx),
    )


@launched
def low_latency_all_reduce(
    members, values: tl.int64, num_elements: tl.int64,
    GROUP: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan``. ``GROUP``: ``Members.vector_size``, ``SIZE``: ``block_size``, ``BLOCK``: pairs of a peer."""
    _all_reduce(
        open_edges(members, True, PTX, GROUP),
        open_edges(members, True, PTX, SIZE),
        values, num_elements, SIZE, DTYPE, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _all_reduce(
    edges, tile, values, num_elements,
    SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PER_PAIR: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    others = tile.others[:, None]
    num_bytes = num_elements * (8 // PER_PAIR)
    if usable(edges):
        going = await_free(edges)
        if going == 1:
            store_to_all(edges, tile, values, num_bytes, WIDTH, BLOCK)
        for turn in range(0, num_turns(num_bytes, BLOCK)):
            if going == 1:
                offsets = pair_offsets(turn, BLOCK)
                # Ends with a barrier, so the sums overwrite nothing that another thread has yet to send.
                _, going = await_pairs(edges, tile, offsets, others & (offsets < num_bytes)[None, :])
                if going == 1:
                    elements = first_pair(turn, BLOCK) * PER_PAIR + tl.arange(0, BLOCK * PER_PAIR)
                    present = elements < num_elements
                    own = _load_bits(values, elements, present, DTYPE)
                    total = _as_float32(own, DTYPE)
                    # Unrolled, so that all loads are on their way before the first is needed.
                    for place in tl.static_range(SIZE):
                        position = tl.full((), place, tl.int32)
                        peer = rank_at(edges.group, position)
                        other = (position < edges.group.size) & (position != edges.group.index)
                        bits = _load_arrived(edges, peer, elements, present & other, DTYPE)
                        value = _as_float32(tl.where(position == edges.group.index, own, bits), DTYPE)
                        if place == 0:
                            total = value
                        else:
                            total = tl.where(position < edges.group.size, total + value, total)
                    _store_rounded(values, elements, total, present, DTYPE)
        finish(edges, 1, 1, edges.published)


@triton.jit
def _load_bits(values, elements, mask, DTYPE: tl.constexpr):
    """The representations of ``elements`` (block), in the lowest bits of int64."""
    if DTYPE.primitive_bitwidth == 32:
        bits = tl.load((values + elements * 4).to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    else:
        bits = tl.load((values + elements * 2).to(tl.pointer_type(tl.int16)), mask=mask, other=0)
    return bits.to(tl.int64)


@triton.jit
def _load_arrived(edges, peer, elements, mask, DTYPE: tl.constexpr):
    """Like ``_load_bits``, of what ``peer`` sent, which has arrived."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    count = tl.load(word_pointer(edge_state(edges.group.lane, peer)) + EDGE_OBSERVED, volatile=True)
    slot = low_latency_slot(edges.group.lane, edges.rank, peer, count % 2)
    words = load_relaxed_block(slot + elements * BYTES // 4 * 8, mask, edges.group.ptx)
    return words >> (elements * BYTES % 4 * 8)


@triton.jit
def _as_float32(bits, DTYPE: tl.constexpr):
    """The value whose representation is in the lowest bits (int64)."""
    if DTYPE == tl.float32:
        value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    elif DTYPE == tl.bfloat16:
        value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _store_rounded(values, elements, value, mask, DTYPE: tl.constexpr):
    """Round to the nearest ``DTYPE``, ties to even, and store ``elements`` (block)."""
    if DTYPE == tl.bfloat16:
        # By hand, since the interpreter's conversion does not round.
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value == value, rounded, 0x7FC0)
        tl.store((values + elements * 2).to(tl.pointer_type(tl.int16)), rounded.to(tl.int16), mask=mask)
    else:
        addresses = values + elements * (DTYPE.primitive_bitwidth // 8)
        tl.store(addresses.to(tl.pointer_type(DTYPE)), value.to(DTYPE), mask=mask)
