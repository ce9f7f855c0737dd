"""Barrier: one program stores a token for every peer and waits for all of theirs.

An instance without bytes, so agreement is all there is: ``gfdit.comm.agreement``. What a rank did before is
visible to whoever has left the barrier.

Reference: ``HostTransport.exchange`` without bytes. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    await_credit,
    edge_state,
    finish,
    usable,
)
from gfdit.kernels.instances import observe, publish
from gfdit.kernels.launch import launch
from gfdit.kernels.members import MEMBERS, Members, ranks_at
from gfdit.kernels.memory import word_pointer


def run(members: Members) -> None:
    """One launch of one warp. Every member has the same ``members.digest``."""
    launch(
        barrier,
        1,
        members.arguments(),
        num_warps=1,
        GROUP=members.vector_size,
        PACKED=members.packed,
        PTX=members.ptx,
    )


@triton.jit(do_not_specialize=MEMBERS)
def barrier(
    lane,
    ranks_low: tl.int64,
    ranks_high: tl.int64,
    table,
    size: tl.int64,
    index: tl.int64,
    digest: tl.int64,
    operation: tl.int64,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run``. ``GROUP``: a power of two not below ``size``."""
    rank = tl.load(lane + LANE_RANK)
    positions = tl.arange(0, GROUP)
    inside = positions < size
    peers = ranks_at(ranks_low, ranks_high, table, tl.where(inside, positions, index), PACKED)
    others = inside & (positions != index)
    counters = word_pointer(edge_state(lane, peers))
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    observed = tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    if usable(lane, peers, others):
        digests = tl.zeros((GROUP,), tl.int64) + digest
        if await_credit(lane, rank, peers, others, published, operation, PTX):
            publish(lane, rank, peers, others, digests, generations, published, 0, PTX)
            observe(lane, rank, peers, others, others, digests, generations, observed, 0, operation, PTX)
        finish(lane, peers, others, 1, 1, published, 1)
