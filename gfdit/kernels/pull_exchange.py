"""All-gather and all-to-all of any size without data slots: each rank takes what is its own from its peers.

Every operation is two instances of each edge. The first says "my data is ready" and, beside its token, at which
offset of the own segment. The peer copies from there straight into its target. The second says "I have taken it",
so that the source may be written again once the operation is over. Three kinds:

- *direct pull*: the source is a heap tensor (``GroupFreeComm.empty``); nothing is staged;
- *direct push*: the target is one. The first instance says where it is, the peers store into it, and the second
  says that they have;
- *staged pull*: for any tensors. Each rank copies its source into its export area first, in as many rounds as
  that takes, each of two instances.

Programs are channels. Each has its own share of every part and of the export area, and its own tokens.

Why one export area and one offset per slot are enough: nobody returns from an operation, and no channel goes to
its next round, before all peers have said that they took what was there. The offset is the same in all rounds.

After a failure a peer that comes late may still store into the target of a direct push, until the reset of the
edge. A late pull only reads, and then fails.

Reference: ``HostTransport.exchange``. Range: large messages, above all between heap tensors; see
``gfdit.comm.selector``. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.comm.layout import OFFSET_WORD
from gfdit.kernels.copy import copy_bytes, copy_share, round_share
from gfdit.kernels.edges import (
    EDGE_OBSERVED,
    LANE_EXPORT,
    await_credit,
    edge_state,
    finish,
    line,
    observe,
    open_edges,
    publish,
    rank_at,
    segment,
    usable,
)
from gfdit.kernels.launch import BULK, FEW_WIDTHS, WIDTHS, Launch, plan_launch
from gfdit.kernels.members import (
    MEMBERS,
    ROW_RECV_OFFSET,
    ROW_SEND_OFFSET,
    Members,
    edge_bytes_at,
    part_at,
)
from gfdit.kernels.memory import word_pointer

# What ``source`` and ``target`` are.
STAGED_PULL = tl.constexpr(0)
DIRECT_PULL = tl.constexpr(1)
DIRECT_PUSH = tl.constexpr(2)

_NO_LIMIT = 1 << 62
_OFFSET_WORD = tl.constexpr(OFFSET_WORD)


def plan(
    members: Members,
    even: tuple[int, int, int],
    *,
    kind: tl.constexpr,
    alignment: int,
    area_stride: int,
    area_bytes: int,
    num_programs: int,
) -> Launch:
    """One launch. ``even``, ``alignment``: see ``gfdit.kernels.push_exchange.plan``.

    ``kind`` is one of the above, equal in all members like ``num_programs``. Staged: position ``i`` finds its
    part at ``i * area_stride`` of the export area, at most ``area_bytes`` (both multiples of 16) at a time; the
    stride is 0 if all positions get the same.
    """
    return plan_launch(
        pull_exchange,
        members,
        num_programs,
        BULK,
        alignment=alignment,
        widths=WIDTHS if members.packed else FEW_WIDTHS,
        after=(*even, area_stride, area_bytes if kind == STAGED_PULL else _NO_LIMIT),
        KIND=kind.value,
    )


@triton.jit(
    do_not_specialize=(
        *MEMBERS,
        "source",
        "target",
        "send_stride",
        "recv_stride",
        "num_bytes",
        "area_stride",
        "area_bytes",
    )
)
def pull_exchange(
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
    send_stride: tl.int64,
    recv_stride: tl.int64,
    num_bytes: tl.int64,
    area_stride: tl.int64,
    area_bytes: tl.int64,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    _exchange(
        open_edges(lane, ranks_low, ranks_high, table, size, index, digest, operation, PACKED, PTX, GROUP, True),
        source, target, send_stride, recv_stride, num_bytes, area_stride, area_bytes, KIND, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _exchange(
    edges, source, target, send_stride, recv_stride, num_bytes, area_stride, area_bytes,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    edge_bytes = edge_bytes_at(edges.group.table, edges.positions, num_bytes, edges.group.packed)
    round_bytes = round_share(edge_bytes, area_bytes, num_programs) * num_programs
    rounds = tl.where(edges.others, tl.maximum((edge_bytes + round_bytes - 1) // round_bytes, 1), 0)
    # Where in this rank's segment the peers find what they need.
    if KIND == STAGED_PULL:
        offsets = tl.load(edges.group.lane + LANE_EXPORT) + edges.positions * area_stride
    elif KIND == DIRECT_PULL:
        offsets = part_at(
            edges.group.table, edges.positions, send_stride, num_bytes, ROW_SEND_OFFSET, edges.group.packed
        )[0]
        offsets += source - segment(edges.group.lane, edges.rank)
    else:
        offsets = part_at(
            edges.group.table, edges.positions, recv_stride, num_bytes, ROW_RECV_OFFSET, edges.group.packed
        )[0]
        offsets += target - segment(edges.group.lane, edges.rank)
    if usable(edges):
        going = await_credit(edges)
        for step in range(0, tl.maximum(tl.max(rounds), 1)):
            active = edges.others & (step < rounds)
            if going == 1:
                if KIND == STAGED_PULL:
                    for distance in range(1, edges.group.size):
                        # What is the same for everybody is put there once.
                        if (area_stride > 0) | (distance == 1):
                            position = (edges.group.index + distance) % edges.group.size
                            share, begin = _turn(
                                edges.group.table, position, num_bytes, area_bytes, step, edges.group.packed
                            )
                            offset, part_bytes = part_at(
                                edges.group.table,
                                position,
                                send_stride,
                                num_bytes,
                                ROW_SEND_OFFSET,
                                edges.group.packed,
                            )
                            area = (
                                segment(edges.group.lane, edges.rank)
                                + tl.load(edges.group.lane + LANE_EXPORT)
                                + position * area_stride
                            )
                            count = tl.minimum(share, part_bytes - begin)
                            copy_bytes(area + program * share, source + offset + begin, count, WIDTH, BLOCK)
                before = edges.published + 2 * step
                tl.store(
                    _offset_word(line(edges.group.lane, edges.peers, edges.rank), before % 2), offsets, mask=active
                )
                publish(edges, active, before, program)
                if step == 0:
                    offset = part_at(
                        edges.group.table,
                        edges.group.index,
                        send_stride,
                        num_bytes,
                        ROW_SEND_OFFSET,
                        edges.group.packed,
                    )[0]
                    place, part_bytes = part_at(
                        edges.group.table,
                        edges.group.index,
                        recv_stride,
                        num_bytes,
                        ROW_RECV_OFFSET,
                        edges.group.packed,
                    )
                    copy_share(target + place, source + offset, part_bytes, WIDTH, BLOCK)
                going = observe(edges, active, edges.observed + 2 * step, program)
            if going == 1:
                for distance in range(1, edges.group.size):
                    position = (edges.group.index + edges.group.size - distance) % edges.group.size
                    peer = rank_at(edges.group, position)
                    share, begin = _turn(
                        edges.group.table, position, num_bytes, area_bytes, step, edges.group.packed
                    )
                    slot = tl.load(word_pointer(edge_state(edges.group.lane, peer)) + EDGE_OBSERVED) % 2
                    remote = segment(edges.group.lane, peer) + tl.load(
                        _offset_word(line(edges.group.lane, edges.rank, peer), slot)
                    )
                    if KIND == DIRECT_PUSH:
                        offset, part_bytes = part_at(
                            edges.group.table,
                            position,
                            send_stride,
                            num_bytes,
                            ROW_SEND_OFFSET,
                            edges.group.packed,
                        )
                        count = tl.minimum(share, part_bytes - begin)
                        _copy_remote(remote + begin, source + offset + begin, count, remote, WIDTH, BLOCK)
                    else:
                        place, part_bytes = part_at(
                            edges.group.table,
                            position,
                            recv_stride,
                            num_bytes,
                            ROW_RECV_OFFSET,
                            edges.group.packed,
                        )
                        count = tl.minimum(share, part_bytes - begin)
                        if KIND == STAGED_PULL:
                            copy_bytes(target + place + begin, remote + program * share, count, WIDTH, BLOCK)
                        else:
                            _copy_remote(target + place + begin, remote + begin, count, remote, WIDTH, BLOCK)
                publish(edges, active, edges.published + 2 * step + 1, program)
                going = observe(edges, active, edges.observed + 2 * step + 1, program)
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(edges, 2 * rounds, 2 * rounds, edges.published + 2 * rounds - 1)


@triton.jit
def _turn(table, position, num_bytes, area_bytes, step, PACKED: tl.constexpr):
    """This program's share of the part of ``position``, and where in the part that of round ``step`` begins."""
    edge_bytes = edge_bytes_at(table, position, num_bytes, PACKED)
    share = round_share(edge_bytes, area_bytes, tl.num_programs(0))
    return share, (step * tl.num_programs(0) + tl.program_id(0)) * share


@triton.jit
def _offset_word(line_address, slot):
    """Pointer to the word that says where in its segment the writer of a line has the data of an instance."""
    return word_pointer(line_address + (_OFFSET_WORD + slot) * 8)


@triton.jit
def _copy_remote(target, source, num_bytes, remote, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A peer's tensor at ``remote`` may be less aligned than the own ones are."""
    if remote % WIDTH == 0:
        copy_bytes(target, source, num_bytes, WIDTH, BLOCK)
    else:
        copy_bytes(target, source, num_bytes, 1, BLOCK)
