"""Broadcast and send of small messages: the source pushes flagged words to all receivers, in one launch.

One-way: before it stores anything the source knows that each receiver has consumed all but one of the instances
before this one, which is all that the two low-latency slots need (``gfdit.comm.agreement`` on credit,
``gfdit.kernels.low_latency`` on the words). A receiver's last program writes the credit.

Reference: ``HostTransport.push`` and ``pull``. Range: messages of up to ``low_latency_bytes``. Never run on a GPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gfdit.kernels.edges import (
    EDGE_CONSUMED,
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    edge_state,
    finish,
    may_begin,
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
    store_payload,
    tile_pairs,
)
from gfdit.kernels.members import MEMBERS, Members, ranks_at
from gfdit.kernels.memory import word_pointer


def run_push(members: Members, source: int, num_bytes: int, *, num_programs: int) -> None:
    """One launch at position 0: the ``num_bytes`` at ``source`` to all other members, which ``run_pull``."""
    arguments = (*members.arguments(), source, num_bytes)
    launch(
        low_latency_push,
        num_programs,
        arguments,
        GROUP=members.block_size,
        **_constants(members, source, num_bytes),
    )


def run_pull(members: Members, target: int, num_bytes: int, *, num_programs: int) -> None:
    """One launch: ``num_bytes`` from position 0, which calls ``run_push``, to ``target``."""
    arguments = (*members.arguments(), target, num_bytes)
    launch(low_latency_pull, num_programs, arguments, **_constants(members, target, num_bytes))


def _constants(members: Members, address: int, num_bytes: int) -> dict[str, Any]:
    return {
        "PACKED": members.packed,
        "WIDTH": payload_width(address, num_bytes),
        "BLOCK": tile_pairs(members.block_size, members.ptx),
        "PTX": members.ptx,
    }


@triton.jit(do_not_specialize=(*MEMBERS, "source", "num_bytes"))
def low_latency_push(
    lane,
    ranks_low: tl.int64,
    ranks_high: tl.int64,
    table,
    size: tl.int64,
    index: tl.int64,
    digest: tl.int64,
    operation: tl.int64,
    source: tl.int64,
    num_bytes: tl.int64,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run_push``. ``GROUP``: a power of two not below ``size``. ``BLOCK``: pairs per peer and turn."""
    rank = tl.load(lane + LANE_RANK)
    positions = tl.arange(0, GROUP)
    inside = positions < size
    others = inside & (positions != index)
    peers = ranks_at(ranks_low, ranks_high, table, tl.where(inside, positions, index), PACKED)
    counters = word_pointer(edge_state(lane, peers))
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    consumed = tl.load(counters + EDGE_CONSUMED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    if usable(lane, peers, others):
        if await_free(lane, rank, peers, others, published, operation, PTX) == 1:
            digests = tl.zeros((GROUP,), tl.int64) + digest
            slots, flags = announce(lane, rank, peers, others, digests, generations, published, PTX)
            for turn in range(0, num_turns(num_bytes, BLOCK)):
                offsets = (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8
                left = num_bytes - offsets
                payload = load_payload(source + offsets, left, left > 0, WIDTH)[None, :]
                pairs = slots[:, None] + offsets[None, :] * 2
                store_pairs(pairs, payload, flags[:, None], others[:, None] & (left > 0)[None, :], PTX)
        finish(lane, peers, others, 1, 0, tl.maximum(consumed, published - 1), tl.num_programs(0))


@triton.jit(do_not_specialize=(*MEMBERS, "target", "num_bytes"))
def low_latency_pull(
    lane,
    ranks_low: tl.int64,
    ranks_high: tl.int64,
    table,
    size: tl.int64,
    index: tl.int64,
    digest: tl.int64,
    operation: tl.int64,
    target: tl.int64,
    num_bytes: tl.int64,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run_pull``. ``BLOCK``: pairs per turn, as many as the source's per peer."""
    rank = tl.load(lane + LANE_RANK)
    # The source, as a block of one.
    peers = ranks_at(ranks_low, ranks_high, table, tl.zeros((1,), tl.int32), PACKED)
    mask = tl.full((1,), 1, tl.int1)
    counters = word_pointer(edge_state(lane, peers))
    published = tl.load(counters + EDGE_PUBLISHED, volatile=True)
    observed = tl.load(counters + EDGE_OBSERVED, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, volatile=True)
    if usable(lane, peers, mask):
        digests = tl.zeros((1,), tl.int64) + digest
        going = may_begin(lane, rank, peers, mask, operation, PTX).to(tl.int32)
        for turn in range(0, num_turns(num_bytes, BLOCK)):
            if going == 1:
                offsets = (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8
                left = (num_bytes - offsets)[None, :]
                payload, going = await_pairs(
                    lane, rank, peers, mask, digests, generations, observed, offsets, left > 0, operation, PTX
                )
                if going == 1:
                    store_payload((target + offsets)[None, :], payload, left, left > 0, WIDTH)
        finish(lane, peers, mask, 0, 1, published, tl.num_programs(0), CREDIT=True, PTX=PTX)
