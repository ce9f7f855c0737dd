"""Publishing and observing an instance on the edges to a block of peers, for one channel of a launch."""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.edges import await_words, line, make_token, signal
from gfdit.kernels.memory import store_release_block


@triton.jit
def publish(lane, rank, peers, mask, digests, generations, count, channel, PTX: tl.constexpr):
    """Publish instance ``count + 1`` of the edges to ``peers`` where ``mask`` is true.

    ``count`` is how many were published before (block), ``channel`` the chunk or program that the token is of.
    What any thread of the program did before is visible to whoever observes it.
    """
    tl.debug_barrier()
    tokens = make_token(digests, generations, count + 1)
    store_release_block(signal(line(lane, peers, rank), count % 2, channel), tokens, mask, PTX)


@triton.jit
def observe(lane, rank, peers, mask, members, digests, generations, count, channel, operation, PTX: tl.constexpr):
    """Wait for instance ``count + 1`` of the edges from ``peers`` where ``mask`` is true; 0 after a failure.

    ``members``: whose aborted edges end the wait. Otherwise like ``publish``.
    """
    tokens = make_token(digests, generations, count + 1)
    words = signal(line(lane, rank, peers), count % 2, channel)
    return await_words(lane, words, tokens, mask, rank, peers, members, operation, PTX).to(tl.int32)
