"""All-gather and all-to-all of small messages: one launch, flagged words, no fence, no staging, no barrier::

    token and pairs to all, copy what stays | await and take the pairs of all

Every program takes every ``num_programs``-th block of pairs, straight from the source into the low-latency slots
of all peers, and straight out of the own slots into the target. Why that is right: ``gfdit.kernels.low_latency``.

Reference: ``HostTransport.exchange``. Range: messages of up to ``low_latency_bytes`` per peer; twice the bytes
travel. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.edges import finish, open_edges, usable
from gfdit.kernels.launch import SMALL, Launch, combined, plan_launch
from gfdit.kernels.low_latency import (
    PAYLOAD_WIDTHS,
    announce,
    await_free,
    await_pairs,
    load_payload,
    num_turns,
    pair_offsets,
    store_pairs,
    store_payload,
    tile_pairs,
)
from gfdit.kernels.members import ROW_RECV_OFFSET, ROW_SEND_OFFSET, Members, edge_bytes_at, part_at


def plan(members: Members, even: tuple[int, int, int], *, alignment: int, num_programs: int) -> Launch:
    """One launch, as in ``gfdit.kernels.push_exchange.plan``. No part may exceed ``low_latency_bytes``.

    ``alignment``: all offsets and sizes combined with "or".
    """
    return plan_launch(
        low_latency_exchange,
        members,
        num_programs,
        SMALL,
        alignment=combined((alignment, *even)),
        widths=PAYLOAD_WIDTHS,
        after=even,
        SIZE=members.block_size,
        BLOCK=tile_pairs(members.block_size, members.ptx),
    )


@launched
def low_latency_exchange(
    members, source: tl.int64, target: tl.int64, send_stride: tl.int64, recv_stride: tl.int64,
    num_bytes: tl.int64,
    GROUP: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan``. ``GROUP``: ``Members.vector_size``, ``SIZE``: ``block_size``, ``BLOCK``: pairs of a peer."""
    _exchange(
        open_edges(members, PACKED, PTX, GROUP, ROWS=True),
        open_edges(members, PACKED, PTX, SIZE),
        source, target, send_stride, recv_stride, num_bytes, SIZE, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _exchange(
    edges, tile, source, target, send_stride, recv_stride, num_bytes,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inside = (tl.arange(0, SIZE) < edges.group.size)[:, None]
    own = (tl.arange(0, SIZE) == edges.group.index)[:, None]
    send_offsets, send_bytes = part_at(
        edges.group.table, tile.positions, send_stride, num_bytes, ROW_SEND_OFFSET, edges.group.packed
    )
    recv_offsets, recv_bytes = part_at(
        edges.group.table, tile.positions, recv_stride, num_bytes, ROW_RECV_OFFSET, edges.group.packed
    )
    sources, targets = (source + send_offsets)[:, None], (target + recv_offsets)[:, None]
    if usable(edges):
        turns = num_turns(
            tl.max(edge_bytes_at(edges.group.table, edges.positions, num_bytes, edges.group.packed)), BLOCK
        )
        going = await_free(edges)
        if going == 1:
            slots, flags = announce(edges, tile)
            for turn in range(0, turns):
                offsets = pair_offsets(turn, BLOCK)
                left = send_bytes[:, None] - offsets[None, :]
                here = inside & (left > 0)
                payload = load_payload(sources + offsets[None, :], left, here, WIDTH)
                pairs = slots[:, None] + offsets[None, :] * 2
                store_pairs(pairs, payload, flags[:, None], here & tile.others[:, None], edges.group.ptx)
                store_payload(targets + offsets[None, :], payload, left, here & own, WIDTH)
        for turn in range(0, turns):
            if going == 1:
                offsets = pair_offsets(turn, BLOCK)
                left = recv_bytes[:, None] - offsets[None, :]
                here = tile.others[:, None] & (left > 0)
                payload, going = await_pairs(edges, tile, offsets, here)
                if going == 1:
                    store_payload(targets + offsets[None, :], payload, left, here, WIDTH)
        finish(edges, 1, 1, edges.published)
