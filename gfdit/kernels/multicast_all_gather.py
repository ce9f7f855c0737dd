"""All-gather by multicast: each rank stores its bytes once, into its area of all segments at the same time::

    put to all at once, tokens | copy what stays | await all, take | tokens back | await them | put to all, ...

A round is two instances of each edge. The first says "my bytes are in your segment"; the second, after the peer
copied them out, "you may overwrite them": there is one area per source, not two slots, since the edges of a source
need not agree on a parity. Programs are channels with their
own shares of the area and their own tokens.

It stores into the segments of ranks outside the group, too. That is harmless, and a waste unless the group is
nearly the world.

Reference: ``HostTransport.exchange``. Range: large messages of large groups. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.copy import copy_share
from gfdit.kernels.edges import await_credit, finish, observe, open_edges, publish, rank_at, usable
from gfdit.kernels.launch import BULK, Launch, plan_launch
from gfdit.kernels.members import Members
from gfdit.kernels.multicast import cut, fence_alias, store_share, take_share


def plan(members: Members, num_bytes: int, *, num_programs: int) -> Launch:
    """One launch: ``num_bytes`` of position ``i`` to ``target + i * num_bytes`` of every member.

    Given its label and the addresses of source and target. A table, if there is one, only says who the members
    are. ``num_programs``, at most ``MAX_PROGRAMS``, is equal in all members.
    """
    return plan_launch(multicast_all_gather, members, num_programs, BULK, alignment=num_bytes, after=(num_bytes,))


@launched
def multicast_all_gather(
    members, source: tl.int64, target: tl.int64, num_bytes: tl.int64,
    GROUP: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    _all_gather(
        open_edges(members, PACKED, PTX, GROUP),
        source, target, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _all_gather(edges, source, target, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    share, rounds = cut(edges.group.lane, num_bytes)
    if usable(edges):
        going = await_credit(edges)
        for step in range(0, rounds):
            if going == 1:
                store_share(edges, source, share, num_bytes, step, WIDTH, BLOCK)
                publish(edges, edges.others, edges.published + 2 * step, program)
                if step == 0:
                    copy_share(target + edges.group.index * num_bytes, source, num_bytes, WIDTH, BLOCK)
                going = observe(edges, edges.others, edges.observed + 2 * step, program)
            if going == 1:
                fence_alias(edges.group.ptx)
                for distance in range(1, edges.group.size):
                    position = (edges.group.index + edges.group.size - distance) % edges.group.size
                    peer = rank_at(edges.group, position)
                    take_share(edges, peer, target + position * num_bytes, share, num_bytes, step, WIDTH, BLOCK)
                publish(edges, edges.others, edges.published + 2 * step + 1, program)
                going = observe(edges, edges.others, edges.observed + 2 * step + 1, program)
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(edges, 2 * rounds, 2 * rounds, edges.published + 2 * rounds - 1)
