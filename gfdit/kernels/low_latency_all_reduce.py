"""Sum of small tensors over a group: everybody sends everything to everybody and adds it up in group order.

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

from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    edge_state,
    finish,
    low_latency_slot,
    read_edge,
    usable,
)
from gfdit.kernels.launch import launch
from gfdit.kernels.low_latency import (
    announce,
    await_free,
    await_pairs,
    first_pair,
    load_payload,
    num_turns,
    payload_width,
    store_pairs,
    tile_pairs,
)
from gfdit.kernels.members import MEMBERS, Members, ranks_at
from gfdit.kernels.memory import load_relaxed_block, word_pointer

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def run(members: Members, flat: torch.Tensor, num_programs: int) -> None:
    """One launch: ``flat`` (elements,) := the sum over the members, in place; contiguous, dtype in ``DTYPES``."""
    launch(
        low_latency_all_reduce,
        num_programs,
        (*members.arguments(), flat.data_ptr(), flat.numel()),
        GROUP=members.block_size,
        DTYPE=DTYPES[flat.dtype],
        WIDTH=payload_width(flat.data_ptr(), flat.nbytes),
        BLOCK=tile_pairs(members.block_size, members.ptx),
        PTX=members.ptx,
    )


@triton.jit(do_not_specialize=(*MEMBERS, "values", "num_elements"))
def low_latency_all_reduce(
    lane,
    ranks_low: tl.int64,
    ranks_high: tl.int64,
    table,
    size: tl.int64,
    index: tl.int64,
    digest: tl.int64,
    operation: tl.int64,
    values: tl.int64,
    num_elements: tl.int64,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run``. ``GROUP``: a power of two not below ``size``. ``BLOCK``: pairs per turn."""
    PER_PAIR: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    rank = tl.load(lane + LANE_RANK)
    positions = tl.arange(0, GROUP)
    inside = positions < size
    others = inside & (positions != index)
    peers = ranks_at(ranks_low, ranks_high, table, tl.where(inside, positions, index), True)
    counters = word_pointer(edge_state(lane, peers))
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    observed = tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    digests = tl.zeros((GROUP,), tl.int64) + digest
    num_bytes = num_elements * (8 // PER_PAIR)
    if usable(lane, peers, others):
        turns = num_turns(num_bytes, BLOCK)
        going = await_free(lane, rank, peers, others, published, operation, PTX)
        if going == 1:
            slots, flags = announce(lane, rank, peers, others, digests, generations, published, PTX)
            for turn in range(0, turns):
                offsets = (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8
                left = num_bytes - offsets
                payload = load_payload(values + offsets, left, left > 0, WIDTH)[None, :]
                pairs = slots[:, None] + offsets[None, :] * 2
                store_pairs(pairs, payload, flags[:, None], others[:, None] & (left > 0)[None, :], PTX)
        for turn in range(0, turns):
            if going == 1:
                offsets = (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8
                here = others[:, None] & (offsets < num_bytes)[None, :]
                # Ends with a barrier, so the sums overwrite nothing that another thread has yet to send.
                _, going = await_pairs(
                    lane, rank, peers, others, digests, generations, observed, offsets, here, operation, PTX
                )
                if going == 1:
                    elements = first_pair(turn, BLOCK) * PER_PAIR + tl.arange(0, BLOCK * PER_PAIR)
                    present = elements < num_elements
                    own = _load_bits(values, elements, present, DTYPE)
                    total = _as_float32(own, DTYPE)
                    # Unrolled, so that all loads are on their way before the first is needed.
                    for place in tl.static_range(GROUP):
                        position = tl.full((), place, tl.int32)
                        peer = ranks_at(ranks_low, ranks_high, table, position, True)
                        other = (position < size) & (position != index)
                        bits = _load_arrived(lane, rank, peer, elements, present & other, DTYPE, PTX)
                        value = _as_float32(tl.where(position == index, own, bits), DTYPE)
                        if place == 0:
                            total = value
                        else:
                            total = tl.where(position < size, total + value, total)
                    _store_rounded(values, elements, total, present, DTYPE)
        finish(lane, peers, others, 1, 1, published, tl.num_programs(0))


@triton.jit
def _load_bits(values, elements, mask, DTYPE: tl.constexpr):
    """The representations of ``elements`` (block), in the lowest bits of int64."""
    if DTYPE.primitive_bitwidth == 32:
        bits = tl.load((values + elements * 4).to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    else:
        bits = tl.load((values + elements * 2).to(tl.pointer_type(tl.int16)), mask=mask, other=0)
    return bits.to(tl.int64)


@triton.jit
def _load_arrived(lane, rank, peer, elements, mask, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Like ``_load_bits``, of what ``peer`` sent, which has arrived."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    slot = low_latency_slot(lane, rank, peer, read_edge(edge_state(lane, peer), EDGE_OBSERVED) % 2)
    words = load_relaxed_block(slot + elements * BYTES // 4 * 8, mask, PTX)
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
