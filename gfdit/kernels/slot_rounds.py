"""Two-way exchanges through data slots, whatever the parts are: agreement, rounds and overlap.

Each rank pushes what goes to a peer into that peer's data slot and copies out of its own slots what came. A
message larger than a slot goes in rounds, one instance of the edge each; a round goes in chunks, each with its own
token. Every program of a launch is a channel that takes every ``num_programs``-th chunk of each slot. A turn is a
chunk to every peer with the tokens behind them, then one from every peer, of the turn before; programs of odd
numbers do it the other way round, so that at any time some use the link and the others the memory::

    even   put 0, tokens | copy what stays | put 1, tokens | await and take 0 | put 2, tokens | ...
    odd    copy what stays | put 0, tokens | await and take 0 | put 1, tokens | await and take 1 | ...

So a peer can drain a chunk as soon as it is there. With no bytes at all it is a barrier.

Why the two data slots are enough although programs run at their own pace: in every round of an operation each
program publishes all its tokens, with or without bytes, so observing round ``n + 1`` from the peer's program
``c`` proves that this program has consumed its part of round ``n``. Operations on one stream do not overlap.

What differs is passed in, as functions of one kind of parts:

- ``UNITS(group, parts, positions, FORTH)``: how many units go to members (``FORTH``) or come from them, and the
  bytes of a unit. Scalars or blocks;
- ``PUT(group, parts, position, place, first, last)``: units [first, last) of what goes to a member, to address
  ``place``, one after the other;
- ``TAKE(group, parts, position, place, first, last)``: the same of what comes from a member, out of ``place``;
- ``KEEP(group, parts)``: this program's share of what stays on the rank.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gfdit.kernels.edges import (
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    LANE_SLOT_BYTES,
    await_credit,
    data_slot,
    edge_state,
    finish,
    observe,
    publish,
    rank_at,
    usable,
)
from gfdit.kernels.memory import word_pointer


@triton.jit
def slot_rounds(
    edges, parts, chunk_bytes,
    UNITS: tl.constexpr, PUT: tl.constexpr, TAKE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A whole launch. ``chunk_bytes``, a multiple of 16, and the number of programs are equal in all members."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    sizes_forth = _sizes(edges.group, parts, edges.positions, chunk_bytes, UNITS, True)
    sizes_back = _sizes(edges.group, parts, edges.positions, chunk_bytes, UNITS, False)
    # Of an edge the same at both ends, in each round: the proof above needs all tokens.
    rounds = tl.where(edges.others, tl.maximum(_num_rounds(sizes_forth), _num_rounds(sizes_back)), 0)
    chunks = tl.where(edges.others, tl.maximum(_num_chunks(sizes_forth), _num_chunks(sizes_back)), 1)
    turns = (tl.max(chunks) + num_programs - 1) // num_programs
    if usable(edges):
        going = await_credit(edges)
        for step in range(0, tl.maximum(tl.max(rounds), 1)):
            active = edges.others & (step < rounds)
            for half in range(0, 2 * turns + 2):
                turn = half // 2
                if half % 2 == program % 2:
                    chunk = turn * num_programs + program
                    if (turn < turns) & (going == 1):
                        for distance in range(1, edges.group.size):
                            position = (edges.group.index + distance) % edges.group.size
                            first, last, place = _chunk(
                                edges.group, parts, position, step, chunk, chunk_bytes, UNITS, True
                            )
                            PUT(edges.group, parts, position, place, first, last)
                        # One release for all peers: each would wait until what was stored before it has arrived.
                        publish(edges, active & (chunk < chunks), edges.published + step, chunk)
                elif turn == 0:
                    if (step == 0) & (going == 1):
                        KEEP(edges.group, parts)
                else:
                    chunk = (turn - 1) * num_programs + program
                    for distance in range(1, edges.group.size):
                        if going == 1:
                            position = (edges.group.index + edges.group.size - distance) % edges.group.size
                            here = active & (edges.positions == position) & (chunk < chunks)
                            going = observe(edges, here, edges.observed + step, chunk)
                            if going == 1:
                                first, last, place = _chunk(
                                    edges.group, parts, position, step, chunk, chunk_bytes, UNITS, False
                                )
                                TAKE(edges.group, parts, position, place, first, last)
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(edges, rounds, rounds, edges.published + rounds - 1)


class _Sizes(NamedTuple):
    """Of one direction of an edge: units in all, in a slot and in a chunk, and bytes of a unit."""

    units: tl.tensor
    slot_units: tl.tensor
    chunk_units: tl.tensor
    unit_bytes: tl.tensor


@triton.jit
def _sizes(group, parts, positions, chunk_bytes, UNITS: tl.constexpr, FORTH: tl.constexpr):
    units, unit_bytes = UNITS(group, parts, positions, FORTH)
    slot_bytes = tl.load(group.lane + LANE_SLOT_BYTES)
    return _Sizes(units, slot_bytes // unit_bytes, (chunk_bytes + unit_bytes - 1) // unit_bytes, unit_bytes)


@triton.jit
def _num_rounds(sizes):
    return tl.maximum((sizes.units + sizes.slot_units - 1) // sizes.slot_units, 1)


@triton.jit
def _num_chunks(sizes):
    """Of each round, the last one too."""
    units = tl.minimum(sizes.units, sizes.slot_units)
    return tl.maximum((units + sizes.chunk_units - 1) // sizes.chunk_units, 1)


@triton.jit
def _chunk(group, parts, position, step, chunk, chunk_bytes, UNITS: tl.constexpr, FORTH: tl.constexpr):
    """The units of a chunk, [first, last), and the address of the first of them in the data slot."""
    sizes = _sizes(group, parts, position, chunk_bytes, UNITS, FORTH)
    begin = step * sizes.slot_units
    first = begin + chunk * sizes.chunk_units
    last = tl.minimum(tl.minimum(first + sizes.chunk_units, begin + sizes.slot_units), sizes.units)
    rank, peer = tl.load(group.lane + LANE_RANK), rank_at(group, position)
    counters = word_pointer(edge_state(group.lane, peer))
    if FORTH:
        slot = data_slot(group.lane, peer, rank, (tl.load(counters + EDGE_PUBLISHED) + step) % 2)
    else:
        slot = data_slot(group.lane, rank, peer, (tl.load(counters + EDGE_OBSERVED) + step) % 2)
    return first, last, slot + (first - begin) * sizes.unit_bytes
