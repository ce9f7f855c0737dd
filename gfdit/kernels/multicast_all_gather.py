"""All-gather by multicast: each rank stores its bytes once, into its area of all segments at the same time.

Every operation is two instances of each edge, in rounds if the message is larger than an area. The first says "my
bytes are in your segment"; the second, after the peer copied them out, "you may overwrite them": there is one area
per source, not two slots, since the edges of a source need not agree on a parity. Programs are channels with their
own shares of the area and their own tokens.

It stores into the segments of ranks outside the group, too. That is harmless, and a waste unless the group is
nearly the world.

Reference: ``HostTransport.exchange``. Range: large messages of large groups. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.copy import copy_bytes, copy_share, round_share
from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_MULTICAST_BYTES,
    LANE_RANK,
    await_credit,
    edge_state,
    finish,
    segment,
    usable,
)
from gfdit.kernels.instances import observe, publish
from gfdit.kernels.launch import block_bytes, common_width, launch
from gfdit.kernels.members import MEMBERS, Members, ranks_at
from gfdit.kernels.memory import word_pointer
from gfdit.kernels.multicast import area_offset, fence_alias, store_to_members


def run(members: Members, source: int, target: int, num_bytes: int, *, num_programs: int) -> None:
    """One launch: ``num_bytes`` of position ``i`` to ``target + i * num_bytes`` of every member.

    ``source``, ``target``: addresses. A table, if there is one, only says who the members are. ``num_programs``,
    at most ``MAX_CHUNKS``, is equal in all members.
    """
    launch(
        multicast_all_gather,
        num_programs,
        (*members.arguments(), source, target, num_bytes),
        GROUP=members.vector_size,
        PACKED=members.packed,
        WIDTH=common_width(source, target, num_bytes),
        BLOCK=block_bytes(members.ptx),
        PTX=members.ptx,
    )


@triton.jit(do_not_specialize=(*MEMBERS, "source", "target", "num_bytes"))
def multicast_all_gather(
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
    num_bytes: tl.int64,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run``. ``GROUP``: ``Members.vector_size``."""
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
    share = round_share(num_bytes, tl.load(lane + LANE_MULTICAST_BYTES), num_programs)
    rounds = tl.maximum((num_bytes + share * num_programs - 1) // (share * num_programs), 1)
    if usable(lane, peers, others):
        going = await_credit(lane, rank, peers, others, published, operation, PTX).to(tl.int32)
        for step in range(0, rounds):
            begin = (step * num_programs + program) * share
            count = tl.minimum(share, num_bytes - begin)
            if going == 1:
                store_to_members(
                    lane,
                    ranks_low,
                    ranks_high,
                    table,
                    size,
                    index,
                    area_offset(lane, rank) + program * share,
                    source + begin,
                    count,
                    PACKED,
                    WIDTH,
                    BLOCK,
                    PTX,
                )
                publish(lane, rank, peers, others, digests, generations, published + 2 * step, program, PTX)
                if step == 0:
                    copy_share(target + index * num_bytes, source, num_bytes, WIDTH, BLOCK)
                before = observed + 2 * step
                going = observe(
                    lane, rank, peers, others, others, digests, generations, before, program, operation, PTX
                )
            if going == 1:
                fence_alias(PTX)
                for distance in range(1, size):
                    position = (index + size - distance) % size
                    peer = ranks_at(ranks_low, ranks_high, table, position, PACKED)
                    area = segment(lane, rank) + area_offset(lane, peer) + program * share
                    copy_bytes(target + position * num_bytes + begin, area, count, WIDTH, BLOCK)
                publish(lane, rank, peers, others, digests, generations, published + 2 * step + 1, program, PTX)
                before = observed + 2 * step + 1
                going = observe(
                    lane, rank, peers, others, others, digests, generations, before, program, operation, PTX
                )
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(lane, peers, others, 2 * rounds, 2 * rounds, published + 2 * rounds - 1, num_programs)
