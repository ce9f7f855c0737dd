"""All-gather and all-to-all of any size: each rank pushes into its peers' data slots, in chunks.

Every program of a launch is a channel that takes every ``num_programs``-th chunk of each slot. It pushes a
chunk to all peers, publishes one token per peer, and, while those bytes travel, copies out the chunk before
it: remote and local copies overlap. Messages larger than a slot go in rounds, one instance of the edge each.
With no bytes at all it is a barrier.

Why the two data slots are enough although programs run at their own pace: in every round of an operation each
program publishes all its tokens, with or without bytes, so observing round ``n + 1`` from the peer's program
``c`` proves that this program has consumed its part of round ``n``. Operations on one stream do not overlap.

Reference: ``HostTransport.exchange``. Range: large messages; see ``gfdit.comm.selector``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.copy import copy_bytes, copy_share
from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    LANE_SLOT_BYTES,
    await_credit,
    data_slot,
    edge_state,
    finish,
    usable,
)
from gfdit.kernels.instances import observe, publish
from gfdit.kernels.launch import block_bytes, common_width, launch
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
from gfdit.kernels.tma_copy import before_tiles, copy_tiles, tile_bytes, tiles_written


def run(
    members: Members,
    source: int,
    target: int,
    even: tuple[int, int, int],
    *,
    alignment: int,
    chunk_bytes: int,
    num_programs: int,
    tma: bool = False,
) -> None:
    """One launch. ``source``, ``target``: addresses. ``alignment``: all offsets combined with "or".

    Packed: ``even`` is (send_stride, recv_stride, num_bytes): position ``i`` gets ``num_bytes`` from
    ``source + i * send_stride``, and ``target + i * recv_stride`` gets what it sends. Otherwise the table says
    all that. ``chunk_bytes``, a multiple of 16, and ``num_programs`` are equal in all members.
    ``tma``: copy tiles, where addresses and offsets are multiples of 16 and the GPU is Hopper or later.
    """
    launch(
        push_exchange,
        num_programs,
        (*members.arguments(), source, target, *even, chunk_bytes),
        GROUP=members.vector_size,
        PACKED=members.packed,
        TMA=tma,
        WIDTH=common_width(source, target, alignment),
        BLOCK=tile_bytes(members.ptx) if tma else block_bytes(members.ptx),
        PTX=members.ptx,
    )


@triton.jit(
    do_not_specialize=(*MEMBERS, "source", "target", "send_stride", "recv_stride", "num_bytes", "chunk_bytes")
)
def push_exchange(
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
    chunk_bytes: tl.int64,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    TMA: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run``. ``GROUP``: ``Members.vector_size``."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rank = tl.load(lane + LANE_RANK)
    slot_bytes = tl.load(lane + LANE_SLOT_BYTES)
    positions = tl.arange(0, GROUP)
    others = (positions < size) & (positions != index)
    positions = tl.where(positions < size, positions, index)
    peers = ranks_at(ranks_low, ranks_high, table, positions, PACKED)
    edge_bytes, digests = edges_at(table, positions, digest, num_bytes, PACKED)
    rounds = tl.where(others, tl.maximum((edge_bytes + slot_bytes - 1) // slot_bytes, 1), 0)
    # Chunks of each round of an edge, the last one too: the proof above needs all of its tokens.
    chunks = tl.maximum((tl.minimum(edge_bytes, slot_bytes) + chunk_bytes - 1) // chunk_bytes, 1)
    turns = (tl.max(tl.where(others, chunks, 1)) + num_programs - 1) // num_programs
    counters = word_pointer(edge_state(lane, peers))
    observed = tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True)
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    if usable(lane, peers, others):
        going = await_credit(lane, rank, peers, others, published, operation, PTX).to(tl.int32)
        for turn in range(0, tl.maximum(tl.max(rounds), 1) * (turns + 1)):
            step = turn // (turns + 1)
            part = turn % (turns + 1)
            if (part < turns) & (going == 1):
                chunk = part * num_programs + program
                begin = step * slot_bytes + chunk * chunk_bytes
                end = tl.minimum(begin + chunk_bytes, (step + 1) * slot_bytes)
                for distance in range(1, size):
                    position = (index + distance) % size
                    peer = ranks_at(ranks_low, ranks_high, table, position, PACKED)
                    offset, part_bytes = part_at(table, position, send_stride, num_bytes, ROW_SEND_OFFSET, PACKED)
                    instance = tl.load(word_pointer(edge_state(lane, peer)) + EDGE_PUBLISHED) + step
                    slot = data_slot(lane, peer, rank, instance % 2) + chunk * chunk_bytes
                    count = tl.minimum(end, part_bytes) - begin
                    if TMA:
                        copy_tiles(slot, source + offset + begin, count, BLOCK)
                    else:
                        copy_bytes(slot, source + offset + begin, count, WIDTH, BLOCK)
                if TMA:
                    tiles_written(PTX)
                sent = others & (step < rounds) & (chunk < chunks)
                publish(lane, rank, peers, sent, digests, generations, published + step, chunk, PTX)
                if turn == 0:
                    offset = part_at(table, index, send_stride, num_bytes, ROW_SEND_OFFSET, PACKED)[0]
                    place, part_bytes = part_at(table, index, recv_stride, num_bytes, ROW_RECV_OFFSET, PACKED)
                    copy_share(target + place, source + offset, part_bytes, WIDTH, BLOCK)
            if (part > 0) & (going == 1):
                chunk = (part - 1) * num_programs + program
                begin = step * slot_bytes + chunk * chunk_bytes
                end = tl.minimum(begin + chunk_bytes, (step + 1) * slot_bytes)
                wanted = others & (step < rounds) & (chunk < chunks)
                before = observed + step
                going = observe(
                    lane, rank, peers, wanted, others, digests, generations, before, chunk, operation, PTX
                )
                if TMA:
                    before_tiles(PTX)
                if going == 1:
                    for distance in range(1, size):
                        position = (index + size - distance) % size
                        peer = ranks_at(ranks_low, ranks_high, table, position, PACKED)
                        place, part_bytes = part_at(
                            table, position, recv_stride, num_bytes, ROW_RECV_OFFSET, PACKED
                        )
                        instance = tl.load(word_pointer(edge_state(lane, peer)) + EDGE_OBSERVED) + step
                        slot = data_slot(lane, rank, peer, instance % 2) + chunk * chunk_bytes
                        count = tl.minimum(end, part_bytes) - begin
                        if TMA:
                            copy_tiles(target + place + begin, slot, count, BLOCK)
                        else:
                            copy_bytes(target + place + begin, slot, count, WIDTH, BLOCK)
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(lane, peers, others, rounds, rounds, published + rounds - 1, num_programs)
