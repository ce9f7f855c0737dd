"""Send and broadcast of any size: one rank pushes its bytes into the data slots of its peers, in chunks::

    await credit | put a chunk to all, tokens | put the next, tokens | ... | await credit | put, tokens | ...

Every program of a launch is a channel that takes every ``num_programs``-th chunk of each slot. Messages larger
than a slot go in rounds, one instance of each edge. ``gfdit.kernels.recv`` is the other end.

A one-way sender observes nothing of its peers, so it needs their credit (``gfdit.comm.agreement``): before it
publishes instance ``i``, its peer has consumed ``i - 1`` of them. Who says so:

- Round 0: what this rank knows from other instances, else the credit of the edge. The last program of a
  receiving launch writes it, so it counts what all programs have consumed.
- Round ``s`` > 0: the same knowledge, else the credit of the channel. Program ``c`` of the receiver writes it
  when it begins round ``s - 1``, and it says: consumed is everything before that round. For ``s = 1`` this is
  true of all programs, since the launches before have ended, however they cut their slots into chunks. For
  ``s > 1`` it is true of this channel, and round ``s`` of the channel overwrites nothing but its own chunks of
  round ``s - 2``: all rounds of a launch are cut alike.

What an earlier launch left in a channel's word never suffices. It ends with the count before the last but one
round of that launch, at least two less than the count before this launch, with which round 1 is content.

Reference: ``HostTransport.push``. Range: what does not fit into low-latency slots. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.comm.agreement import CREDIT_DIGEST
from gfdit.comm.layout import CHANNEL_CREDIT_WORD
from gfdit.kernels.compiled import launched
from gfdit.kernels.copy import copy_bytes
from gfdit.kernels.edges import (
    EDGE_PUBLISHED,
    LANE_SLOT_BYTES,
    await_credit,
    await_words,
    data_slot,
    edge_state,
    finish,
    line,
    make_token,
    open_edges,
    publish,
    rank_at,
    usable,
)
from gfdit.kernels.launch import BULK, Launch, plan_launch
from gfdit.kernels.members import Members
from gfdit.kernels.memory import word_pointer

_CREDIT_DIGEST = tl.constexpr(CREDIT_DIGEST)
_CHANNEL_CREDIT_WORD = tl.constexpr(CHANNEL_CREDIT_WORD)


def plan(members: Members, num_bytes: int, *, chunk_bytes: int, num_programs: int) -> Launch:
    """One launch, given its label and the address of the ``num_bytes`` that all other members get.

    ``chunk_bytes``, a multiple of 16, and ``num_programs``, at most ``MAX_PROGRAMS``, are those of the receivers.
    A table, if there is one, only says who the members are: all edges have the digest of ``members``.
    """
    return plan_launch(send, members, num_programs, BULK, after=(num_bytes, chunk_bytes))


@launched
def send(
    members, source: tl.int64, num_bytes: tl.int64, chunk_bytes: tl.int64,
    GROUP: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    _send(
        open_edges(members, PACKED, PTX, GROUP),
        source, num_bytes, chunk_bytes, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _send(edges, source, num_bytes, chunk_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    slot_bytes = tl.load(edges.group.lane + LANE_SLOT_BYTES)
    rounds, chunks = rounds_and_chunks(num_bytes, slot_bytes, chunk_bytes)
    if usable(edges):
        going = await_credit(edges)
        for step in range(0, rounds):
            if (step > 0) & (going == 1):
                needed = edges.published + step - 1
                credits = make_token(edges.digests * 0 + _CREDIT_DIGEST, edges.generations, needed)
                words = line(edges.group.lane, edges.rank, edges.peers) + (_CHANNEL_CREDIT_WORD + program) * 8
                short = edges.others & (needed > edges.consumed)
                going = await_words(edges, words, credits, short, EXACT=False)
            if going == 1:
                for chunk in range(program, chunks, tl.num_programs(0)):
                    begin, end = chunk_at(step, chunk, num_bytes, slot_bytes, chunk_bytes)
                    for distance in range(1, edges.group.size):
                        peer = rank_at(edges.group, (edges.group.index + distance) % edges.group.size)
                        instance = (
                            tl.load(word_pointer(edge_state(edges.group.lane, peer)) + EDGE_PUBLISHED) + step
                        )
                        slot = data_slot(edges.group.lane, peer, edges.rank, instance % 2) + chunk * chunk_bytes
                        copy_bytes(slot, source + begin, end - begin, WIDTH, BLOCK)
                    publish(edges, edges.others, edges.published + step, chunk)
        # The last round was published with credit for all but the one before it.
        finish(edges, rounds, 0, tl.maximum(edges.consumed, edges.published + rounds - 2))


@triton.jit
def chunk_at(step, chunk, num_bytes, slot_bytes, chunk_bytes):
    """The bytes [begin, end) of a chunk of a round."""
    begin = step * slot_bytes + chunk * chunk_bytes
    return begin, tl.minimum(tl.minimum(begin + chunk_bytes, (step + 1) * slot_bytes), num_bytes)


@triton.jit
def rounds_and_chunks(num_bytes, slot_bytes, chunk_bytes):
    """How many rounds a message takes, and how many chunks each of them has, the last one too."""
    rounds = tl.maximum((num_bytes + slot_bytes - 1) // slot_bytes, 1)
    chunks = tl.maximum((tl.minimum(num_bytes, slot_bytes) + chunk_bytes - 1) // chunk_bytes, 1)
    return rounds, chunks.to(tl.int32)
