"""A wait that may be long, by one warp: until the source of a one-way operation has begun::

    await a token of the source, take nothing

What moves the bytes then waits for a peer that is at work, never for one that has not come. Many programs that
spin would hold as many multiprocessors, for as long as the source computes.

Counters stay what they are, and ``gfdit.kernels.recv`` finds the token it has seen. After a
failure the edge is broken, so that the receiver does nothing.

Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.edges import finish, may_begin, observe, open_edges, usable
from gfdit.kernels.launch import ONE_WARP, Launch, plan_launch
from gfdit.kernels.members import Members


def plan(members: Members) -> Launch:
    """One launch of one warp, given its label, in front of that of a receiver with the same members."""
    return plan_launch(gate, members, 1, ONE_WARP)


@launched
def gate(members, GROUP: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr):
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    _gate(open_edges(members, PACKED, PTX, GROUP, FIRST=True))


@triton.jit
def _gate(edges):
    if usable(edges):
        if may_begin(edges) == 1:
            observe(edges, edges.others, edges.observed, 0)
        finish(edges, 0, 0, edges.consumed)
