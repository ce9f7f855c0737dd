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
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_EXPORT,
    LANE_RANK,
    await_credit,
    edge_state,
    finish,
    line,
    segment,
    usable,
)
from gfdit.kernels.instances import observe, publish
from gfdit.kernels.launch import block_bytes, common_width, launch
from gfdit.kernels.members import (
    MEMBERS,
    ROW_RECV_OFFSET,
    ROW_SEND_OFFSET,
    Members,
    edges_at,
    part_at,
    ranks_at,
)
from gfdit.kernels.memory import word_pointer

# What ``source`` and ``target`` are.
STAGED_PULL = tl.constexpr(0)
DIRECT_PULL = tl.constexpr(1)
DIRECT_PUSH = tl.constexpr(2)

_NO_LIMIT = 1 << 62
_OFFSET_WORD = tl.constexpr(OFFSET_WORD)


def run(
    members: Members,
    source: int,
    target: int,
    even: tuple[int, int, int],
    *,
    kind: tl.constexpr,
    alignment: int,
    area_stride: int,
    area_bytes: int,
    num_programs: int,
) -> None:
    """One launch. ``source``, ``target``, ``even``, ``alignment``: see ``gfdit.kernels.push_exchange.run``.

    ``kind`` is one of the above, equal in all members like ``num_programs``. Staged: position ``i`` finds its
    part at ``i * area_stride`` of the export area, at most ``area_bytes`` (both multiples of 16) at a time; the
    stride is 0 if all positions get the same.
    """
    staged = kind == STAGED_PULL
    launch(
        pull_exchange,
        num_programs,
        (*members.arguments(), source, target, *even, area_stride, area_bytes if staged else _NO_LIMIT),
        GROUP=members.vector_size,
        PACKED=members.packed,
        KIND=kind.value,
        WIDTH=common_width(source, target, alignment),
        BLOCK=block_bytes(members.ptx),
        PTX=members.ptx,
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
    """See ``run``. ``GROUP``: ``Members.vector_size``."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rank = tl.load(lane + LANE_RANK)
    positions = tl.arange(0, GROUP)
    others = (positions < size) & (positions != index)
    positions = tl.where(positions < size, positions, index)
    peers = ranks_at(ranks_low, ranks_high, table, positions, PACKED)
    edge_bytes, digests = edges_at(table, positions, digest, num_bytes, PACKED)
    round_bytes = round_share(edge_bytes, area_bytes, num_programs) * num_programs
    rounds = tl.where(others, tl.maximum((edge_bytes + round_bytes - 1) // round_bytes, 1), 0)
    counters = word_pointer(edge_state(lane, peers))
    observed = tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True)
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    # Where in this rank's segment the peers find what they need.
    if KIND == STAGED_PULL:
        offsets = tl.load(lane + LANE_EXPORT) + positions * area_stride
    elif KIND == DIRECT_PULL:
        offsets = part_at(table, positions, send_stride, num_bytes, ROW_SEND_OFFSET, PACKED)[0]
        offsets += source - segment(lane, rank)
    else:
        offsets = part_at(table, positions, recv_stride, num_bytes, ROW_RECV_OFFSET, PACKED)[0]
        offsets += target - segment(lane, rank)
    if usable(lane, peers, others):
        going = await_credit(lane, rank, peers, others, published, operation, PTX).to(tl.int32)
        for step in range(0, tl.maximum(tl.max(rounds), 1)):
            active = others & (step < rounds)
            if going == 1:
                if KIND == STAGED_PULL:
                    for distance in range(1, size):
                        # What is the same for everybody is put there once.
                        if (area_stride > 0) | (distance == 1):
                            position = (index + distance) % size
                            share, begin = _turn(table, position, num_bytes, area_bytes, step, PACKED)
                            offset, part_bytes = part_at(
                                table, position, send_stride, num_bytes, ROW_SEND_OFFSET, PACKED
                            )
                            area = segment(lane, rank) + tl.load(lane + LANE_EXPORT) + position * area_stride
                            count = tl.minimum(share, part_bytes - begin)
                            copy_bytes(area + program * share, source + offset + begin, count, WIDTH, BLOCK)
                before = published + 2 * step
                tl.store(_offset_word(line(lane, peers, rank), before % 2), offsets, mask=active)
                publish(lane, rank, peers, active, digests, generations, before, program, PTX)
                if step == 0:
                    offset = part_at(table, index, send_stride, num_bytes, ROW_SEND_OFFSET, PACKED)[0]
                    place, part_bytes = part_at(table, index, recv_stride, num_bytes, ROW_RECV_OFFSET, PACKED)
                    copy_share(target + place, source + offset, part_bytes, WIDTH, BLOCK)
                before = observed + 2 * step
                going = observe(
                    lane, rank, peers, active, others, digests, generations, before, program, operation, PTX
                )
            if going == 1:
                for distance in range(1, size):
                    position = (index + size - distance) % size
                    peer = ranks_at(ranks_low, ranks_high, table, position, PACKED)
                    share, begin = _turn(table, position, num_bytes, area_bytes, step, PACKED)
                    slot = tl.load(word_pointer(edge_state(lane, peer)) + EDGE_OBSERVED) % 2
                    remote = segment(lane, peer) + tl.load(_offset_word(line(lane, rank, peer), slot))
                    if KIND == DIRECT_PUSH:
                        offset, part_bytes = part_at(
                            table, position, send_stride, num_bytes, ROW_SEND_OFFSET, PACKED
                        )
                        count = tl.minimum(share, part_bytes - begin)
                        _copy_remote(remote + begin, source + offset + begin, count, remote, WIDTH, BLOCK)
                    else:
                        place, part_bytes = part_at(
                            table, position, recv_stride, num_bytes, ROW_RECV_OFFSET, PACKED
                        )
                        count = tl.minimum(share, part_bytes - begin)
                        if KIND == STAGED_PULL:
                            copy_bytes(target + place + begin, remote + program * share, count, WIDTH, BLOCK)
                        else:
                            _copy_remote(target + place + begin, remote + begin, count, remote, WIDTH, BLOCK)
                before = published + 2 * step + 1
                publish(lane, rank, peers, active, digests, generations, before, program, PTX)
                before = observed + 2 * step + 1
                going = observe(
                    lane, rank, peers, active, others, digests, generations, before, program, operation, PTX
                )
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(lane, peers, others, 2 * rounds, 2 * rounds, published + 2 * rounds - 1, num_programs)


@triton.jit
def _turn(table, position, num_bytes, area_bytes, step, PACKED: tl.constexpr):
    """This program's share of the part of ``position``, and where in the part that of round ``step`` begins."""
    edge_bytes = edges_at(table, position, 0, num_bytes, PACKED)[0]
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
