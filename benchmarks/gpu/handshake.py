"""What no collective can beat: a kernel of one warp that sends every peer a word and waits for theirs.

No counters, no digests, no failures: the words are numbered by the launch. The barrier and the small messages are
measured against it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gfdit.comm import GroupFreeComm
from gfdit.kernels.compiled import Variant
from gfdit.kernels.launch import ONE_WARP, launcher
from gfdit.kernels.memory import load_acquire_block, store_release_block


class Handshake:
    """Words in the heap tensors of all ranks; one at a time per heap. Waits without bound."""

    def __init__(self, comm: GroupFreeComm) -> None:
        self._comm = comm
        # The first tensor of every rank: at the same offset in all segments.
        self._words = comm.empty((comm.world_size,), torch.int64).zero_()
        offset = self._words.data_ptr() - comm.heap.base_pointer(comm.rank)
        bases = [comm.heap.base_pointer(rank) + offset for rank in range(comm.world_size)]
        self._bases = torch.tensor(bases, dtype=torch.int64).to(comm.device)
        self._count = torch.zeros(1, dtype=torch.int64, device=comm.device)
        constants: dict[str, Any] = {
            "GROUP": 1 << (comm.world_size - 1).bit_length(),
            "PTX": comm.device.type == "cuda",
        }
        launcher.warm_up([Variant.of(handshake, num_warps=ONE_WARP.num_warps, **constants)])
        self._launch = launcher.prepare(handshake, 1, ONE_WARP, **constants)
        comm.synchronize()

    def __call__(self) -> None:
        self._launch(self._bases, self._count, self._comm.world_size, self._comm.rank)


@triton.jit(do_not_specialize=("size", "rank"))
def handshake(lane, table, size: tl.int64, rank: tl.int64, GROUP: tl.constexpr, PTX: tl.constexpr):
    """``lane``: addresses of all ranks' words; ``table``: how often it was launched, one word."""
    number = tl.load(table) + 1
    peers = tl.arange(0, GROUP)
    others = (peers < size) & (peers != rank)
    bases = tl.load(lane + peers, mask=others, other=0)
    store_release_block(bases + rank * 8, tl.zeros((GROUP,), tl.int64) + number, others, PTX)
    own = tl.load(lane + rank)
    waiting = others
    while tl.sum(waiting.to(tl.int32)) > 0:
        waiting = others & (load_acquire_block(own + peers * 8, waiting, PTX) < number) & waiting
    tl.debug_barrier()
    tl.store(table, number)
