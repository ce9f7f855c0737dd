"""A kernel that stores where nothing is: what looks for such stores must find it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def store_far_away(x, distance: tl.int64):
    """``x``: bytes; one is stored ``distance`` bytes behind their first."""
    tl.store(x + distance, tl.full((), 1, tl.uint8))


def store_out_of_bounds() -> None:
    """On the current GPU, which can be used no more by this process."""
    x = torch.zeros(1024, dtype=torch.uint8, device="cuda")
    store_far_away[(1,)](x, 1 << 40)
    torch.cuda.synchronize()
