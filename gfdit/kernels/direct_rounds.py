"""Two-way exchanges straight into place, whatever the parts are: each byte is written once, where it belongs.

An operation is two instances of each edge. The first says where in the own segment the outputs are, and that what
was there may be overwritten. The second says that all has been put there::

    even   announce, token to all | await token of peer 1, put | of peer 2, put | ... | token to all | copy what
           stays | await the second token of all
    odd    announce, token to all | copy what stays | await token of peer 1, put | of peer 2, put | ... | token to
           all | await the second token of all

Programs of a launch are channels: each has its share of what goes to every peer. Half of them copy what stays on
the rank, which only needs the memory, while the others use the link. With no data slots there is nothing to drain
and no round; the price is a hop before the first byte.

After a failure a peer that comes late may still store into the outputs, until the reset of the edge.

What differs is passed in, as functions of one kind of parts:

- ``ANNOUNCE(edges, parts)``: this rank's places to all peers, in ``place_words`` of their lines;
- ``PUT(edges, parts, position)``: this program's share of what goes to a member, which has announced its places,
  or of what comes from it, if those are what it sends;
- ``KEEP(group, parts)``: this program's share of what stays on the rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.comm.layout import MAX_TENSORS, PLACE_FIELDS, PLACE_WORD
from gfdit.kernels.edges import await_credit, finish, observe, publish, usable
from gfdit.kernels.memory import word_pointer

_MAX_TENSORS = tl.constexpr(MAX_TENSORS)
_PLACE_FIELDS = tl.constexpr(PLACE_FIELDS)
_PLACE_WORD = tl.constexpr(PLACE_WORD)


@triton.jit
def direct_rounds(edges, parts, ANNOUNCE: tl.constexpr, PUT: tl.constexpr, KEEP: tl.constexpr):
    """A whole launch. The number of programs is equal in all members."""
    program = tl.program_id(0)
    if usable(edges):
        going = await_credit(edges)
        if going == 1:
            ANNOUNCE(edges, parts)
            publish(edges, edges.others, edges.published, program)
        for half in range(0, 2):
            if half % 2 != program % 2:
                if going == 1:
                    KEEP(edges.group, parts)
            else:
                for distance in range(1, edges.group.size):
                    position = (edges.group.index + distance) % edges.group.size
                    if going == 1:
                        here = edges.others & (edges.positions == position)
                        going = observe(edges, here, edges.observed, program)
                        if going == 1:
                            PUT(edges, parts, position)
                if going == 1:
                    publish(edges, edges.others, edges.published + 1, program)
        if going == 1:
            observe(edges, edges.others, edges.observed + 1, program)
        # A two-way instance proves that the peer has consumed all of mine before it.
        twice = tl.where(edges.others, 2, 0)
        finish(edges, twice, twice, edges.published + 1)


@triton.jit
def place_words(line_address, slot, number: tl.constexpr):
    """Pointer to the words in which the writer of a line says where it has a tensor; ``slot``: of an instance."""
    return word_pointer(line_address + (_PLACE_WORD + (slot * _MAX_TENSORS + number) * _PLACE_FIELDS) * 8)
