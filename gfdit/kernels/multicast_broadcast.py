"""Broadcast by multicast: one rank stores its bytes once, into its area of all segments at the same time.

Two launches, one for the source (``run_push``) and one for everybody else (``run_pull``). A round is one instance
of the edge to each receiver, "my bytes are in your segment", and one back, "I have copied them out", after which
the area may be overwritten. So unlike ``gfdit.kernels.send`` the source waits for the receivers, and no credit is
owed for what it sends: the instances back say it. Programs are channels with their own shares of the area.

Reference: ``HostTransport.push`` and ``pull``. Range: large messages to nearly the world. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.copy import copy_bytes, round_share
from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_MULTICAST_BYTES,
    LANE_RANK,
    await_credit,
    edge_state,
    finish,
    may_begin,
    segment,
    usable,
)
from gfdit.kernels.instances import observe, publish
from gfdit.kernels.launch import block_bytes, common_width, launch
from gfdit.kernels.members import MEMBERS, Members, ranks_at
from gfdit.kernels.memory import word_pointer
from gfdit.kernels.multicast import area_offset, fence_alias, store_to_members


def run_push(members: Members, source: int, num_bytes: int, *, num_programs: int) -> None:
    """One launch: the ``num_bytes`` at address ``source`` of position 0, the caller, to all other members.

    A table, if there is one, only says who the members are. ``num_programs``, at most ``MAX_CHUNKS``, is that of
    the receivers.
    """
    launch(
        multicast_push,
        num_programs,
        (*members.arguments(), source, num_bytes),
        GROUP=members.vector_size,
        PACKED=members.packed,
        WIDTH=common_width(source),
        BLOCK=block_bytes(members.ptx),
        PTX=members.ptx,
    )


def run_pull(members: Members, target: int, num_bytes: int, *, num_programs: int) -> None:
    """One launch: ``num_bytes`` to address ``target`` from the member at position 0, which calls ``run_push``."""
    launch(
        multicast_pull,
        num_programs,
        (*members.arguments(), target, num_bytes),
        PACKED=members.packed,
        WIDTH=common_width(target),
        BLOCK=block_bytes(members.ptx),
        PTX=members.ptx,
    )


@triton.jit(do_not_specialize=(*MEMBERS, "source", "num_bytes"))
def multicast_push(
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
    """See ``run_push``. ``GROUP``: ``Members.vector_size``."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rank = tl.load(lane + LANE_RANK)
    positions = tl.arange(0, GROUP)
    others = (positions < size) & (positions != index)
    positions = tl.where(positions < size, positions, index)
    peers = ranks_at(ranks_low, ranks_high, table, positions, PACKED)
    digests = tl.zeros((GROUP,), tl.int64) + digest
    counters = word_pointer(edge_state(lane, peers))
    observed = tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True)
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    share, rounds = _cut(lane, num_bytes)
    if usable(lane, peers, others):
        going = await_credit(lane, rank, peers, others, published, operation, PTX).to(tl.int32)
        for step in range(0, rounds):
            if going == 1:
                begin = (step * num_programs + program) * share
                count = tl.minimum(share, num_bytes - begin)
                offset = area_offset(lane, rank) + program * share
                store_to_members(
                    lane,
                    ranks_low,
                    ranks_high,
                    table,
                    size,
                    index,
                    offset,
                    source + begin,
                    count,
                    PACKED,
                    WIDTH,
                    BLOCK,
                    PTX,
                )
                publish(lane, rank, peers, others, digests, generations, published + step, program, PTX)
                before = observed + step
                going = observe(
                    lane, rank, peers, others, others, digests, generations, before, program, operation, PTX
                )
        # The last instance back says that everything was consumed.
        finish(lane, peers, others, rounds, rounds, published + rounds, num_programs)


@triton.jit(do_not_specialize=(*MEMBERS, "target", "num_bytes"))
def multicast_pull(
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
    """See ``run_pull``."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rank = tl.load(lane + LANE_RANK)
    # The source, as a block of one.
    peers = ranks_at(ranks_low, ranks_high, table, tl.zeros((1,), tl.int32), PACKED)
    mask = tl.full((1,), 1, tl.int1)
    digests = tl.zeros((1,), tl.int64) + digest
    counters = word_pointer(edge_state(lane, peers))
    observed = tl.load(counters + EDGE_OBSERVED, volatile=True)
    published = tl.load(counters + EDGE_PUBLISHED, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, volatile=True)
    share, rounds = _cut(lane, num_bytes)
    area = segment(lane, rank) + area_offset(lane, tl.sum(peers)) + program * share
    if usable(lane, peers, mask):
        going = may_begin(lane, rank, peers, mask, operation, PTX).to(tl.int32)
        for step in range(0, rounds):
            if going == 1:
                before = observed + step
                going = observe(
                    lane, rank, peers, mask, mask, digests, generations, before, program, operation, PTX
                )
            if going == 1:
                fence_alias(PTX)
                begin = (step * num_programs + program) * share
                copy_bytes(target + begin, area, tl.minimum(share, num_bytes - begin), WIDTH, BLOCK)
                publish(lane, rank, peers, mask, digests, generations, published + step, program, PTX)
        # The source sent a round after it had observed the instance back of the round before.
        finish(lane, peers, mask, rounds, rounds, published + rounds - 1, num_programs)


@triton.jit
def _cut(lane, num_bytes):
    """Bytes that a program moves in a round, and how many rounds there are."""
    share = round_share(num_bytes, tl.load(lane + LANE_MULTICAST_BYTES), tl.num_programs(0))
    round_bytes = share * tl.num_programs(0)
    return share, tl.maximum((num_bytes + round_bytes - 1) // round_bytes, 1)
