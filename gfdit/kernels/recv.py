"""The receiving end of ``gfdit.kernels.send``, of any size.

Program ``c`` waits for the chunks of the sender's program ``c``, copies them out, and gives credit to it as that
module says. Credit for the last two rounds is not needed inside the launch: its last program gives that of the
edge, for all programs, when all of them are done.

Reference: ``HostTransport.pull``. Range: as for ``gfdit.kernels.send``. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.comm.agreement import CREDIT_DIGEST
from gfdit.comm.layout import CHANNEL_CREDIT_WORD
from gfdit.kernels.copy import copy_bytes
from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    LANE_SLOT_BYTES,
    data_slot,
    edge_state,
    finish,
    line,
    make_token,
    may_begin,
    usable,
)
from gfdit.kernels.instances import observe
from gfdit.kernels.launch import block_bytes, common_width, launch
from gfdit.kernels.members import MEMBERS, Members, ranks_at
from gfdit.kernels.memory import store_release_block, word_pointer
from gfdit.kernels.send import rounds_and_chunks

_CREDIT_DIGEST = tl.constexpr(CREDIT_DIGEST)
_CHANNEL_CREDIT_WORD = tl.constexpr(CHANNEL_CREDIT_WORD)


def run(members: Members, target: int, num_bytes: int, *, chunk_bytes: int, num_programs: int) -> None:
    """One launch: ``num_bytes`` to address ``target`` from the member at position 0, which calls ``send.run``.

    ``chunk_bytes`` and ``num_programs`` are those of the sender.
    """
    launch(
        recv,
        num_programs,
        (*members.arguments(), target, num_bytes, chunk_bytes),
        PACKED=members.packed,
        WIDTH=common_width(target),
        BLOCK=block_bytes(members.ptx),
        PTX=members.ptx,
    )


@triton.jit(do_not_specialize=(*MEMBERS, "target", "num_bytes", "chunk_bytes"))
def recv(
    lane,
    ranks_low: tl.int64,
    ranks_high: tl.int64,
    table,
    size,
    index,
    digest,
    operation,
    target: tl.int64,
    num_bytes: tl.int64,
    chunk_bytes: tl.int64,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run``."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rank = tl.load(lane + LANE_RANK)
    slot_bytes = tl.load(lane + LANE_SLOT_BYTES)
    # The sender, as a block of one and as a scalar.
    peers = ranks_at(ranks_low, ranks_high, table, tl.zeros((1,), tl.int32), PACKED)
    peer = tl.sum(peers)
    mask = tl.full((1,), 1, tl.int1)
    digests = tl.zeros((1,), tl.int64) + digest
    counters = word_pointer(edge_state(lane, peers))
    published = tl.load(counters + EDGE_PUBLISHED, volatile=True)
    observed = tl.load(counters + EDGE_OBSERVED, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, volatile=True)
    rounds, chunks = rounds_and_chunks(num_bytes, slot_bytes, chunk_bytes)
    if usable(lane, peers, mask):
        going = may_begin(lane, rank, peers, mask, operation, PTX).to(tl.int32)
        for step in range(0, rounds):
            if (step + 1 < rounds) & (going == 1):
                tl.debug_barrier()
                credits = make_token(tl.full((1,), _CREDIT_DIGEST, tl.int64), generations, observed + step)
                words = line(lane, peers, rank) + (_CHANNEL_CREDIT_WORD + program) * 8
                store_release_block(words, credits, mask, PTX)
            for chunk in range(program, chunks, num_programs):
                if going == 1:
                    before = observed + step
                    going = observe(
                        lane, rank, peers, mask, mask, digests, generations, before, chunk, operation, PTX
                    )
                    if going == 1:
                        begin = step * slot_bytes + chunk * chunk_bytes
                        end = tl.minimum(tl.minimum(begin + chunk_bytes, (step + 1) * slot_bytes), num_bytes)
                        slot = data_slot(lane, rank, peer, tl.sum(before) % 2) + chunk * chunk_bytes
                        copy_bytes(target + begin, slot, end - begin, WIDTH, BLOCK)
        # Receiving a one-way instance proves that the sender has consumed all of mine.
        finish(lane, peers, mask, 0, rounds, published, num_programs, CREDIT=True, PTX=PTX)
