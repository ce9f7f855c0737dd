"""The receiving end of ``gfdit.kernels.send``, of any size::

    credit | await and take a chunk | await and take the next | ... | credit | await and take | ... | last credit

Program ``c`` takes the chunks of the sender's program ``c``, and gives credit to it as that module says. Credit
for the last two rounds is not needed inside the launch: its last program gives that of the edge, for all
programs, when all of them are done.

Reference: ``HostTransport.pull``. Range: as for ``gfdit.kernels.send``. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.comm.agreement import CREDIT_DIGEST
from gfdit.comm.layout import CHANNEL_CREDIT_WORD
from gfdit.kernels.compiled import launched
from gfdit.kernels.copy import copy_bytes
from gfdit.kernels.edges import (
    EDGE_OBSERVED,
    LANE_SLOT_BYTES,
    data_slot,
    edge_state,
    finish,
    line,
    make_token,
    may_begin,
    observe,
    open_edges,
    rank_at,
    usable,
)
from gfdit.kernels.launch import BULK, Launch, plan_launch
from gfdit.kernels.members import Members
from gfdit.kernels.memory import store_release_block, word_pointer
from gfdit.kernels.send import chunk_at, rounds_and_chunks

_CREDIT_DIGEST = tl.constexpr(CREDIT_DIGEST)
_CHANNEL_CREDIT_WORD = tl.constexpr(CHANNEL_CREDIT_WORD)


def plan(members: Members, num_bytes: int, *, chunk_bytes: int, num_programs: int) -> Launch:
    """One launch, given its label and the address to fill from the member at position 0, which sends.

    ``chunk_bytes`` and ``num_programs`` are those of the sender.
    """
    return plan_launch(recv, members, num_programs, BULK, after=(num_bytes, chunk_bytes))


@launched
def recv(
    members, target: tl.int64, num_bytes: tl.int64, chunk_bytes: tl.int64,
    GROUP: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    _recv(
        open_edges(members, PACKED, PTX, GROUP, FIRST=True),
        target, num_bytes, chunk_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _recv(edges, target, num_bytes, chunk_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    slot_bytes = tl.load(edges.group.lane + LANE_SLOT_BYTES)
    sender = rank_at(edges.group, tl.full((), 0, tl.int32))
    instance = tl.load(word_pointer(edge_state(edges.group.lane, sender)) + EDGE_OBSERVED)
    rounds, chunks = rounds_and_chunks(num_bytes, slot_bytes, chunk_bytes)
    if usable(edges):
        going = may_begin(edges)
        for step in range(0, rounds):
            if (step + 1 < rounds) & (going == 1):
                tl.debug_barrier()
                consumed = edges.observed + step
                credits = make_token(edges.digests * 0 + _CREDIT_DIGEST, edges.generations, consumed)
                words = line(edges.group.lane, edges.peers, edges.rank) + (_CHANNEL_CREDIT_WORD + program) * 8
                store_release_block(words, credits, edges.others, edges.group.ptx)
            for chunk in range(program, chunks, tl.num_programs(0)):
                if going == 1:
                    going = observe(edges, edges.others, edges.observed + step, chunk)
                    if going == 1:
                        begin, end = chunk_at(step, chunk, num_bytes, slot_bytes, chunk_bytes)
                        slot = (
                            data_slot(edges.group.lane, edges.rank, sender, (instance + step) % 2)
                            + chunk * chunk_bytes
                        )
                        copy_bytes(target + begin, slot, end - begin, WIDTH, BLOCK)
        # Receiving a one-way instance proves that the sender has consumed all of mine.
        finish(edges, 0, rounds, edges.published, True)
