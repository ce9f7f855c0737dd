"""All-gather and all-to-all of any size between heap tensors: nothing is staged, each byte is copied once.

- *direct push*: the target is a heap tensor (``GroupFreeComm.empty``), and peers store into it;
- *direct pull*: the source is one, and peers load from it. The second instance says that they have, so that it may
  be written again once the operation is over.

How it goes in time is said in ``gfdit.kernels.direct_rounds``. After a failure a late pull only reads, and then
fails.

Reference: ``HostTransport.exchange``. Range: large messages; see ``gfdit.comm.selector``. Never run on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.copy import copy_bytes
from gfdit.kernels.direct_rounds import direct_rounds, place_words
from gfdit.kernels.edges import EDGE_OBSERVED, edge_state, line, open_edges, rank_at, segment
from gfdit.kernels.launch import BULK, FEW_WIDTHS, WIDTHS, Launch, plan_launch
from gfdit.kernels.members import Members
from gfdit.kernels.memory import word_pointer
from gfdit.kernels.push_exchange import ByteParts, keep_bytes, received_part, sent_part


def plan(members: Members, even: tuple[int, int, int], *, pull: bool, alignment: int, num_programs: int) -> Launch:
    """One launch. ``even``, ``alignment``: see ``gfdit.kernels.push_exchange.plan``.

    ``pull`` and ``num_programs`` are equal in all members.
    """
    return plan_launch(
        direct_exchange,
        members,
        num_programs,
        BULK,
        alignment=alignment,
        widths=WIDTHS if members.packed else FEW_WIDTHS,
        after=tuple(even),
        PULL=pull,
    )


@launched
def direct_exchange(
    members, source: tl.int64, target: tl.int64, send_stride: tl.int64, recv_stride: tl.int64,
    num_bytes: tl.int64,
    GROUP: tl.constexpr, PACKED: tl.constexpr, PULL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    direct_rounds(
        open_edges(members, PACKED, PTX, GROUP, ROWS=True),
        DirectParts(ByteParts(source, target, send_stride, recv_stride, num_bytes, WIDTH, BLOCK), PULL),
        announce_part, move_part, keep_part,
    )  # fmt: skip


class DirectParts(NamedTuple):
    """``pull``: see ``plan``."""

    own: tl.tuple
    pull: tl.constexpr


@triton.jit
def announce_part(edges, parts):
    """To each peer, where in this segment its part is."""
    if parts.pull:
        here = sent_part(edges.group, parts.own, edges.positions)[0]
    else:
        here = received_part(edges.group, parts.own, edges.positions)[0]
    words = place_words(line(edges.group.lane, edges.peers, edges.rank), edges.published % 2, 0)
    tl.store(words, here - segment(edges.group.lane, edges.rank), mask=edges.others)


@triton.jit
def move_part(edges, parts, position):
    group = edges.group
    peer = rank_at(group, position)
    slot = tl.load(word_pointer(edge_state(group.lane, peer)) + EDGE_OBSERVED) % 2
    words = place_words(line(group.lane, edges.rank, peer), slot, 0)
    # The same in every thread: nobody writes there once the token is seen, and the branches below depend on it.
    remote = segment(group.lane, peer) + tl.load(words)
    if parts.pull:
        source = remote
        target, num_bytes = received_part(group, parts.own, position)
    else:
        source, num_bytes = sent_part(group, parts.own, position)
        target = remote
    share = (num_bytes + tl.num_programs(0) * 16 - 1) // (tl.num_programs(0) * 16) * 16
    begin = tl.program_id(0) * share
    count = tl.minimum(share, num_bytes - begin)
    _copy_remote(target + begin, source + begin, count, remote, parts.own.width, parts.own.block)


@triton.jit
def keep_part(group, parts):
    keep_bytes(group, parts.own)


@triton.jit
def _copy_remote(target, source, num_bytes, remote, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A peer's tensor at ``remote`` may be less aligned than the own ones are."""
    if remote % WIDTH == 0:
        copy_bytes(target, source, num_bytes, WIDTH, BLOCK)
    else:
        copy_bytes(target, source, num_bytes, 1, BLOCK)
