"""Broadcast and send of small messages: the source pushes flagged words to all receivers, in one launch::

    source     await credit | token and pairs to all
    receivers  await and take the pairs | credit

One-way: before it stores anything the source knows that each receiver has consumed all but one of the instances
before this one, which is all that the two low-latency slots need (``gfdit.comm.agreement`` on credit,
``gfdit.kernels.low_latency`` on the words). A receiver's last program writes the credit.

Reference: ``HostTransport.push`` and ``pull``. Range: messages of up to ``low_latency_bytes``. Never run on a GPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.edges import finish, may_begin, open_edges, usable
from gfdit.kernels.launch import SMALL, Launch, plan_launch
from gfdit.kernels.low_latency import (
    PAYLOAD_WIDTHS,
    await_free,
    await_pairs,
    num_turns,
    pair_offsets,
    store_payload,
    store_to_all,
    tile_pairs,
)
from gfdit.kernels.members import Members


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


@launched
def low_latency_push(
    members, source: tl.int64, num_bytes: tl.int64,
    GROUP: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan_push``. ``GROUP``: ``Members.vector_size``, ``SIZE``: ``block_size``, ``BLOCK``: of a peer."""
    _push(
        open_edges(members, PACKED, PTX, GROUP),
        open_edges(members, PACKED, PTX, SIZE),
        source, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _push(edges, tile, source, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if usable(edges):
        if await_free(edges) == 1:
            store_to_all(edges, tile, source, num_bytes, WIDTH, BLOCK)
        finish(edges, 1, 0, tl.maximum(edges.consumed, edges.published - 1))


@launched
def low_latency_pull(
    members, target: tl.int64, num_bytes: tl.int64,
    GROUP: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan_pull``. ``BLOCK``: pairs per turn, as many as the source's per peer."""
    _pull(
        open_edges(members, PACKED, PTX, GROUP, FIRST=True),
        open_edges(members, PACKED, PTX, 1, FIRST=True),
        target, num_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _pull(edges, tile, target, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if usable(edges):
        going = may_begin(edges)
        for turn in range(0, num_turns(num_bytes, BLOCK)):
            if going == 1:
                offsets = pair_offsets(turn, BLOCK)
                left = (num_bytes - offsets)[None, :]
                payload, going = await_pairs(edges, tile, offsets, left > 0)
                if going == 1:
                    store_payload((target + offsets)[None, :], payload, left, left > 0, WIDTH)
        # Receiving a one-way instance proves that the sender has consumed all of mine.
        finish(edges, 0, 1, edges.published, True)
