"""Broadcast by multicast: one rank stores its bytes once, into its area of all segments at the same time.

Two launches, one for the source (``plan_push``) and one for the others (``plan_pull``). A round is one instance
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
    LANE_MULTICAST_BYTES,
    await_credit,
    finish,
    may_begin,
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


def plan_push(members: Members, num_bytes: int, *, num_programs: int) -> Launch:
    """One launch at position 0, given its label and the address of what all others get, who ``plan_pull``.

    A table, if there is one, only says who the members are. ``num_programs``, at most ``MAX_PROGRAMS``, is that of
    the receivers.
    """
    return plan_launch(multicast_push, members, num_programs, BULK, after=(num_bytes,))


def plan_pull(members: Members, num_bytes: int, *, num_programs: int) -> Launch:
    """One launch, given its label and the address to fill from position 0, which calls ``plan_push``."""
    return plan_launch(multicast_pull, members, num_programs, BULK, after=(num_bytes,))


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
    """See ``plan_push``. ``GROUP``: ``Members.vector_size``."""
    _push(
        open_edges(lane, ranks_low, ranks_high, table, size, index, digest, operation, PACKED, PTX, GROUP),
        source, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _push(edges, source, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    share, rounds = _cut(edges.group.lane, num_bytes)
    if usable(edges):
        going = await_credit(edges)
        for step in range(0, rounds):
            if going == 1:
                begin = (step * tl.num_programs(0) + program) * share
                count = tl.minimum(share, num_bytes - begin)
                place = area_offset(edges.group.lane, edges.rank) + program * share
                store_to_members(edges.group, place, source + begin, count, WIDTH, BLOCK)
                publish(edges, edges.others, edges.published + step, program)
                going = observe(edges, edges.others, edges.observed + step, program)
        # The last instance back says that everything was consumed.
        finish(edges, rounds, rounds, edges.published + rounds)


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
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``plan_pull``. ``GROUP``: ``Members.vector_size``."""
    _pull(
        open_edges(lane, ranks_low, ranks_high, table, size, index, digest, operation,
                   PACKED, PTX, GROUP, False, True),
        target, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _pull(edges, target, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    sender = rank_at(edges.group, tl.full((), 0, tl.int32))
    share, rounds = _cut(edges.group.lane, num_bytes)
    area = segment(edges.group.lane, edges.rank) + area_offset(edges.group.lane, sender) + program * share
    if usable(edges):
        going = may_begin(edges)
        for step in range(0, rounds):
            if going == 1:
                going = observe(edges, edges.others, edges.observed + step, program)
            if going == 1:
                fence_alias(edges.group.ptx)
                begin = (step * tl.num_programs(0) + program) * share
                copy_bytes(target + begin, area, tl.minimum(share, num_bytes - begin), WIDTH, BLOCK)
                publish(edges, edges.others, edges.published + step, program)
        # The source sent a round after it had observed the instance back of the round before.
        finish(edges, rounds, rounds, edges.published + rounds - 1)


@triton.jit
def _cut(lane, num_bytes):
    """Bytes that a program moves in a round, and how many rounds there are."""
    share = round_share(num_bytes, tl.load(lane + LANE_MULTICAST_BYTES), tl.num_programs(0))
    round_bytes = share * tl.num_programs(0)
    return share, tl.maximum((num_bytes + round_bytes - 1) // round_bytes, 1)
