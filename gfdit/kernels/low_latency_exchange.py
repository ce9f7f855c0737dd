"""All-gather and all-to-all of small messages: one launch, flagged words, no fence, no staging, no barrier.

Every program takes every ``num_programs``-th block of pairs. It stores its blocks for all peers straight from the
source into their low-latency slots, then takes those of all peers straight out of the own slots into the target.
Why that is right: ``gfdit.kernels.low_latency``.

Reference: ``HostTransport.exchange``. Range: messages of up to ``low_latency_bytes`` per peer; twice the bytes
travel. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    edge_state,
    finish,
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
from gfdit.kernels.members import (
    MEMBERS,
    ROW_RECV_OFFSET,
    ROW_SEND_OFFSET,
    Members,
    edges_at,
    part_at,
    ranks_at,
)
from gfdit.kernels.memory import word_pointer


def run(
    members: Members,
    source: int,
    target: int,
    even: tuple[int, int, int],
    *,
    alignment: int,
    num_programs: int,
) -> None:
    """One launch; parameters as in ``push_exchange``. No part may exceed ``low_latency_bytes``.

    ``alignment``: all offsets and sizes combined with "or".
    """
    launch(
        low_latency_exchange,
        num_programs,
        (*members.arguments(), source, target, *even),
        GROUP=members.block_size,
        PACKED=members.packed,
        WIDTH=payload_width(source, target, alignment, *even),
        BLOCK=tile_pairs(members.block_size, members.ptx),
        PTX=members.ptx,
    )


@triton.jit(do_not_specialize=(*MEMBERS, "source", "target", "send_stride", "recv_stride", "num_bytes"))
def low_latency_exchange(
    lane,
    ranks_low: tl.int64,
    ranks_high: tl.int64,
    table,
    size: tl.int64,
    index: tl.int64,
    digest: tl.int64,
    operation: tl.int64,
    source: tl.int64,
    target: tl.int64,
    send_stride: tl.int64,
    recv_stride: tl.int64,
    num_bytes: tl.int64,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run``. ``GROUP``: a power of two not below ``size``. ``BLOCK``: pairs per peer and turn."""
    rank = tl.load(lane + LANE_RANK)
    positions = tl.arange(0, GROUP)
    inside = positions < size
    others = inside & (positions != index)
    own = (positions == index)[:, None]
    positions = tl.where(inside, positions, index)
    peers = ranks_at(ranks_low, ranks_high, table, positions, PACKED)
    edge_bytes, digests = edges_at(table, positions, digest, num_bytes, PACKED)
    send_offsets, send_bytes = part_at(table, positions, send_stride, num_bytes, ROW_SEND_OFFSET, PACKED)
    recv_offsets, recv_bytes = part_at(table, positions, recv_stride, num_bytes, ROW_RECV_OFFSET, PACKED)
    sources, targets = (source + send_offsets)[:, None], (target + recv_offsets)[:, None]
    counters = word_pointer(edge_state(lane, peers))
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    observed = tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    if usable(lane, peers, others):
        turns = num_turns(tl.max(edge_bytes), BLOCK)
        going = await_free(lane, rank, peers, others, published, operation, PTX)
        if going == 1:
            slots, flags = announce(lane, rank, peers, others, digests, generations, published, PTX)
            for turn in range(0, turns):
                offsets = (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8
                left = send_bytes[:, None] - offsets[None, :]
                here = inside[:, None] & (left > 0)
                payload = load_payload(sources + offsets[None, :], left, here, WIDTH)
                pairs = slots[:, None] + offsets[None, :] * 2
                store_pairs(pairs, payload, flags[:, None], here & others[:, None], PTX)
                store_payload(targets + offsets[None, :], payload, left, here & own, WIDTH)
        for turn in range(0, turns):
            if going == 1:
                offsets = (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8
                left = recv_bytes[:, None] - offsets[None, :]
                here = others[:, None] & (left > 0)
                payload, going = await_pairs(
                    lane, rank, peers, others, digests, generations, observed, offsets, here, operation, PTX
                )
                if going == 1:
                    store_payload(targets + offsets[None, :], payload, left, here, WIDTH)
        finish(lane, peers, others, 1, 1, published, tl.num_programs(0))
