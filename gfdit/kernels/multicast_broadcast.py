"""Broadcast by multicast: one rank stores its bytes once, into its area of all segments at the same time::

    source     put to all at once, tokens | await the tokens back | put to all, ...
    receivers  await, take | token back | await, take | ...

A round is one instance of the edge to each receiver, "my bytes are in your segment", and one back, "I have copied
them out", after which the area may be overwritten. So unlike ``gfdit.kernels.send`` the source waits for the
receivers, and no credit is owed for what it sends: the instances back say it. Programs are channels with their
own shares of the area.

Reference: ``HostTransport.push`` and ``pull``. Range: large messages to nearly the world. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.edges import await_credit, finish, may_begin, observe, open_edges, publish, rank_at, usable
from gfdit.kernels.launch import BULK, Launch, plan_launch
from gfdit.kernels.members import Members
from gfdit.kernels.multicast import cut, fence_alias, store_share, take_share


def plan_push(members: Members, num_bytes: int, *, num_programs: int) -> Launch:
    """One launch at position 0, given its label and the address of what all others get, who ``plan_pull``.

    A table, if there is one, only says who the members are. ``num_programs``, at most ``MAX_PROGRAMS``, is that of
    the receivers.
    """
    return plan_launch(multicast_push, members, num_programs, BULK, after=(num_bytes,))


def plan_pull(members: Members, num_bytes: int, *, num_programs: int) -> Launch:
    """One launch, given its label and the address to fill from position 0, which calls ``plan_push``."""
    return plan_launch(multicast_pull, members, num_programs, BULK, after=(num_bytes,))


@launched
def multicast_push(
    members, source: tl.int64, num_bytes: tl.int64,
    GROUP: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan_push``. ``GROUP``: ``Members.vector_size``."""
    _push(
        open_edges(members, PACKED, PTX, GROUP),
        source, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _push(edges, source, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    share, rounds = cut(edges.group.lane, num_bytes)
    if usable(edges):
        going = await_credit(edges)
        for step in range(0, rounds):
            if going == 1:
                store_share(edges, source, share, num_bytes, step, WIDTH, BLOCK)
                publish(edges, edges.others, edges.published + step, program)
                going = observe(edges, edges.others, edges.observed + step, program)
        # The last instance back says that everything was consumed.
        finish(edges, rounds, rounds, edges.published + rounds)


@launched
def multicast_pull(
    members, target: tl.int64, num_bytes: tl.int64,
    GROUP: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan_pull``. ``GROUP``: ``Members.vector_size``."""
    _pull(
        open_edges(members, PACKED, PTX, GROUP, FIRST=True),
        target, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _pull(edges, target, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    sender = rank_at(edges.group, tl.full((), 0, tl.int32))
    share, rounds = cut(edges.group.lane, num_bytes)
    if usable(edges):
        going = may_begin(edges)
        for step in range(0, rounds):
            if going == 1:
                going = observe(edges, edges.others, edges.observed + step, program)
            if going == 1:
                fence_alias(edges.group.ptx)
                take_share(edges, sender, target, share, num_bytes, step, WIDTH, BLOCK)
                publish(edges, edges.others, edges.published + step, program)
        # The source sent a round after it had observed the instance back of the round before.
        finish(edges, rounds, rounds, edges.published + rounds - 1)
