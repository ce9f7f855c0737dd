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
    LANE_MULTICAST_BYTES,
    await_credit,
    finish,
    observe,
    open_edges,
    publish,
    rank_at,
    segment,
    usable,
)
from gfdit.kernels.launch import BULK, Launch, plan_launch
from gfdit.kernels.members import MEMBERS, Members
from gfdit.kernels.multicast import area_offset, fence_alias, store_to_members


def plan(members: Members, num_bytes: int, *, num_programs: int) -> Launch:
    """One launch: ``num_bytes`` of position ``i`` to ``target + i * num_bytes`` of every member.

    Given its label and the addresses of source and target. A table, if there is one, only says who the members
    are. ``num_programs``, at most ``MAX_PROGRAMS``, is equal in all members.
    """
    return plan_launch(multicast_all_gather, members, num_programs, BULK, alignment=num_bytes, after=(num_bytes,))


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
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    _all_gather(
        open_edges(lane, ranks_low, ranks_high, table, size, index, digest, operation, PACKED, PTX, GROUP),
        source, target, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _all_gather(edges, source, target, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    share = round_share(num_bytes, tl.load(edges.group.lane + LANE_MULTICAST_BYTES), num_programs)
    rounds = tl.maximum((num_bytes + share * num_programs - 1) // (share * num_programs), 1)
    if usable(edges):
        going = await_credit(edges)
        for step in range(0, rounds):
            begin = (step * num_programs + program) * share
            count = tl.minimum(share, num_bytes - begin)
            if going == 1:
                place = area_offset(edges.group.lane, edges.rank) + program * share
                store_to_members(edges.group, place, source + begin, count, WIDTH, BLOCK)
                publish(edges, edges.others, edges.published + 2 * step, program)
                if step == 0:
                    copy_share(target + edges.group.index * num_bytes, source, num_bytes, WIDTH, BLOCK)
                going = observe(edges, edges.others, edges.observed + 2 * step, program)
            if going == 1:
                fence_alias(edges.group.ptx)
                for distance in range(1, edges.group.size):
                    position = (edges.group.index + edges.group.size - distance) % edges.group.size
                    peer = rank_at(edges.group, position)
                    area = (
                        segment(edges.group.lane, edges.rank)
                        + area_offset(edges.group.lane, peer)
                        + program * share
                    )
                    copy_bytes(target + position * num_bytes + begin, area, count, WIDTH, BLOCK)
                publish(edges, edges.others, edges.published + 2 * step + 1, program)
                going = observe(edges, edges.others, edges.observed + 2 * step + 1, program)
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(edges, 2 * rounds, 2 * rounds, edges.published + 2 * rounds - 1)
