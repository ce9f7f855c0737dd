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

from gfdit.kernels.edges import finish, may_begin, open_edges, usable
from gfdit.kernels.launch import SMALL, Launch, plan_launch
from gfdit.kernels.low_latency import (
    PAYLOAD_WIDTHS,
    announce,
    await_free,
    await_pairs,
    first_pair,
    load_payload,
    num_turns,
    store_pairs,
    store_payload,
    tile_pairs,
)
from gfdit.kernels.members import MEMBERS, Members


def plan_push(members: Members, num_bytes: int, *, num_programs: int) -> Launch:
    """One launch at position 0, given its label and the address of what all others get, who ``plan_pull``."""
    return _plan(low_latency_push, members, num_bytes, num_programs)


def plan_pull(members: Members, num_bytes: int, *, num_programs: int) -> Launch:
    """One launch, given its label and the address to fill from position 0, which calls ``plan_push``."""
    return _plan(low_latency_pull, members, num_bytes, num_programs)


def _plan(kernel: Any, members: Members, num_bytes: int, num_programs: int) -> Launch:
    return plan_launch(
        kernel,
        members,
        num_programs,
        SMALL,
        alignment=num_bytes,
        widths=PAYLOAD_WIDTHS,
        after=(num_bytes,),
        SIZE=members.block_size,
        BLOCK=tile_pairs(members.block_size, members.ptx),
    )


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
    SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``plan_push``. ``GROUP``: ``Members.vector_size``, ``SIZE``: ``block_size``, ``BLOCK``: of a peer."""
    _push(
        open_edges(lane, ranks_low, ranks_high, table, size, index, digest, operation, PACKED, PTX, GROUP),
        open_edges(lane, ranks_low, ranks_high, table, size, index, digest, operation, PACKED, PTX, SIZE),
        source, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _push(edges, tile, source, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if usable(edges):
        if await_free(edges) == 1:
            slots, flags = announce(edges, tile)
            for turn in range(0, num_turns(num_bytes, BLOCK)):
                offsets = (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8
                left = num_bytes - offsets
                payload = load_payload(source + offsets, left, left > 0, WIDTH)[None, :]
                pairs = slots[:, None] + offsets[None, :] * 2
                store_pairs(
                    pairs, payload, flags[:, None], tile.others[:, None] & (left > 0)[None, :], edges.group.ptx
                )
        finish(edges, 1, 0, tl.maximum(edges.consumed, edges.published - 1))


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
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``plan_pull``. ``BLOCK``: pairs per turn, as many as the source's per peer."""
    _pull(
        open_edges(lane, ranks_low, ranks_high, table, size, index, digest, operation,
                   PACKED, PTX, GROUP, False, True),
        open_edges(lane, ranks_low, ranks_high, table, size, index, digest, operation,
                   PACKED, PTX, 1, False, True),
        target, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _pull(edges, tile, target, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if usable(edges):
        going = may_begin(edges)
        for turn in range(0, num_turns(num_bytes, BLOCK)):
            if going == 1:
                offsets = (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8
                left = (num_bytes - offsets)[None, :]
                payload, going = await_pairs(edges, tile, offsets, left > 0)
                if going == 1:
                    store_payload((target + offsets)[None, :], payload, left, left > 0, WIDTH)
        # Receiving a one-way instance proves that the sender has consumed all of mine.
        finish(edges, 0, 1, edges.published, True)
