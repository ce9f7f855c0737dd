"""All-gather and all-to-all of any size: each rank pushes into its peers' data slots, in chunks.

Every program of a launch is a channel that takes every ``NUM_PROGRAMS``-th chunk of each slot. It pushes a
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

from gfdit.kernels.copy import copy_bytes
from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    LANE_SLOT_BYTES,
    await_words,
    data_slot,
    edge_state,
    finish,
    line,
    make_token,
    signal,
    usable,
)
from gfdit.kernels.launch import block_bytes, common_width, launch
from gfdit.kernels.members import (
    MEMBERS,
    ROW_DIGEST,
    ROW_RECV_BYTES,
    ROW_RECV_OFFSET,
    ROW_SEND_BYTES,
    ROW_SEND_OFFSET,
    Members,
    ranks_at,
    row,
)
from gfdit.kernels.memory import store_release, word_pointer


def run(
    members: Members,
    source: int,
    target: int,
    even: tuple[int, int, int],
    *,
    alignment: int,
    chunk_bytes: int,
    num_programs: int,
) -> None:
    """One launch. ``source``, ``target``: addresses. ``alignment``: all offsets combined with "or".

    Packed: ``even`` is (send_stride, recv_stride, num_bytes): position ``i`` gets ``num_bytes`` from
    ``source + i * send_stride``, and ``target + i * recv_stride`` gets what it sends. Otherwise the table says
    all that. ``chunk_bytes``, a multiple of 16, and ``num_programs`` are equal in all members.
    """
    launch(
        push_exchange,
        num_programs,
        (*members.arguments(), source, target, *even, chunk_bytes),
        GROUP=members.block_size,
        PACKED=members.packed,
        WIDTH=common_width(source, target, alignment),
        BLOCK=block_bytes(members.ptx),
        NUM_PROGRAMS=num_programs,
        PTX=members.ptx,
    )


@triton.jit(
    do_not_specialize=(*MEMBERS, "source", "target", "send_stride", "recv_stride", "num_bytes", "chunk_bytes")
)
def push_exchange(
    lane,
    ranks_low,
    ranks_high,
    table,
    size,
    index,
    digest,
    operation,
    source,
    target,
    send_stride,
    recv_stride,
    num_bytes,
    chunk_bytes,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run``. ``GROUP``: a power of two not below ``size``."""
    program = tl.program_id(0)
    rank = tl.load(lane + LANE_RANK)
    slot_bytes = tl.load(lane + LANE_SLOT_BYTES)
    positions = tl.arange(0, GROUP)
    inside = positions < size
    peers = ranks_at(ranks_low, ranks_high, table, tl.where(inside, positions, index), PACKED)
    others = inside & (positions != index)
    if PACKED:
        edge_bytes = tl.full((GROUP,), 0, tl.int64) + num_bytes
        digests = tl.full((GROUP,), 0, tl.int64) + digest
    else:
        sent = row(table, tl.where(inside, positions, index), ROW_SEND_BYTES)
        received = row(table, tl.where(inside, positions, index), ROW_RECV_BYTES)
        edge_bytes = tl.maximum(sent, received)
        digests = row(table, tl.where(inside, positions, index), ROW_DIGEST)
    rounds = tl.where(others, tl.maximum((edge_bytes + slot_bytes - 1) // slot_bytes, 1), 0)
    # Chunks of each round of an edge, the last one too: the proof above needs all of its tokens.
    chunks = tl.maximum((tl.minimum(edge_bytes, slot_bytes) + chunk_bytes - 1) // chunk_bytes, 1)
    turns = (tl.max(tl.where(others, chunks, 0)) + NUM_PROGRAMS - 1) // NUM_PROGRAMS
    counters = word_pointer(edge_state(lane, peers))
    observed = tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True)
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    lines = line(lane, rank, peers)
    if usable(lane, peers, others):
        if PACKED:
            own_source, own_target, own_bytes = (
                source + index * send_stride,
                target + index * recv_stride,
                num_bytes,
            )
        else:
            own_source = source + row(table, index, ROW_SEND_OFFSET)
            own_target = target + row(table, index, ROW_RECV_OFFSET)
            own_bytes = row(table, index, ROW_SEND_BYTES)
        _copy_own(own_target, own_source, own_bytes, program, WIDTH, BLOCK, NUM_PROGRAMS)
        going = 1
        for turn in range(0, tl.max(rounds) * (turns + 1)):
            step = turn // (turns + 1)
            part = turn % (turns + 1)
            if (part < turns) & (going == 1):
                chunk = part * NUM_PROGRAMS + program
                for distance in range(1, size):
                    position = (index + distance) % size
                    peer = ranks_at(ranks_low, ranks_high, table, position, PACKED)
                    chosen = positions == position
                    if tl.sum((chosen & (step < rounds) & (chunk < chunks)).to(tl.int32)) > 0:
                        if PACKED:
                            data = source + position * send_stride
                            size_bytes = num_bytes
                        else:
                            data = source + row(table, position, ROW_SEND_OFFSET)
                            size_bytes = row(table, position, ROW_SEND_BYTES)
                        instance = tl.sum(tl.where(chosen, published, 0)) + step
                        begin = step * slot_bytes + chunk * chunk_bytes
                        end = tl.minimum(tl.minimum(begin + chunk_bytes, (step + 1) * slot_bytes), size_bytes)
                        slot = data_slot(lane, peer, rank, instance % 2) + chunk * chunk_bytes
                        copy_bytes(slot, data + begin, end - begin, WIDTH, BLOCK)
                        tl.debug_barrier()
                        generation = tl.sum(tl.where(chosen, generations, 0))
                        token = make_token(tl.sum(tl.where(chosen, digests, 0)), generation, instance + 1)
                        store_release(signal(line(lane, peer, rank), instance % 2, chunk), token, PTX)
            if (part > 0) & (going == 1):
                chunk = (part - 1) * NUM_PROGRAMS + program
                wanted = others & (step < rounds) & (chunk < chunks)
                instances = observed + step
                expected = make_token(digests, generations, instances + 1)
                tokens = signal(lines, instances % 2, chunk)
                arrived = await_words(lane, tokens, expected, wanted, rank, peers, others, operation, PTX)
                going = arrived.to(tl.int32)
                if going == 1:
                    for distance in range(1, size):
                        position = (index + size - distance) % size
                        chosen = positions == position
                        if tl.sum((chosen & wanted).to(tl.int32)) > 0:
                            peer = ranks_at(ranks_low, ranks_high, table, position, PACKED)
                            if PACKED:
                                data = target + position * recv_stride
                                size_bytes = num_bytes
                            else:
                                data = target + row(table, position, ROW_RECV_OFFSET)
                                size_bytes = row(table, position, ROW_RECV_BYTES)
                            instance = tl.sum(tl.where(chosen, observed, 0)) + step
                            begin = step * slot_bytes + chunk * chunk_bytes
                            end = tl.minimum(tl.minimum(begin + chunk_bytes, (step + 1) * slot_bytes), size_bytes)
                            slot = data_slot(lane, rank, peer, instance % 2) + chunk * chunk_bytes
                            copy_bytes(data + begin, slot, end - begin, WIDTH, BLOCK)
                    tl.debug_barrier()
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(lane, peers, others, rounds, rounds, published + rounds - 1, NUM_PROGRAMS)


@triton.jit
def _copy_own(
    target, source, num_bytes, program, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM_PROGRAMS: tl.constexpr
):
    """This program's share of the part that the rank keeps; nothing if it is in its place already."""
    share = (num_bytes + NUM_PROGRAMS * WIDTH - 1) // (NUM_PROGRAMS * WIDTH) * WIDTH
    begin = program * share
    if target != source:
        copy_bytes(target + begin, source + begin, tl.minimum(share, num_bytes - begin), WIDTH, BLOCK)
