"""Barrier::

    token to all | await the token of all

An instance without bytes, so agreement is all there is: ``gfdit.comm.agreement``. What a rank did before is
visible to whoever has left the barrier.

Reference: ``HostTransport.exchange`` without bytes. Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.edges import await_credit, finish, observe, open_edges, publish, usable
from gfdit.kernels.launch import ONE_WARP, Launch, plan_launch
from gfdit.kernels.members import Members


def plan(members: Members) -> Launch:
    """One launch of one warp, given its label. Every member has the same ``members.digest``."""
    return plan_launch(barrier, members, 1, ONE_WARP)


@launched
def barrier(members, GROUP: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr):
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    _barrier(open_edges(members, PACKED, PTX, GROUP))


@triton.jit
def _barrier(edges):
    if usable(edges):
        if await_credit(edges) == 1:
            publish(edges, edges.others, edges.published, 0)
            observe(edges, edges.others, edges.observed, 0)
        finish(edges, 1, 1, edges.published)
