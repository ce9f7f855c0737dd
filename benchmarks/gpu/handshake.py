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

# Some seconds; an interpreted poll gives up its core.
GPU_POLLS, INTERPRETED_POLLS = 1 << 22, 1 << 14


class Handshake:
    """Words in the heap tensors of all ranks; one at a time per heap."""

    def __init__(self, comm: GroupFreeComm) -> None:
        self._comm = comm
        # The first tensor of every rank: at the same offset in all segments.
        self._words = comm.empty((comm.world_size,), torch.int64).zero_()
        offset = self._words.data_ptr() - comm.heap.base_pointer(comm.rank)
        bases = [comm.heap.base_pointer(rank) + offset for rank in range(comm.world_size)]
        self._bases = torch.tensor(bases, dtype=torch.int64).to(comm.device)
        self._count = torch.zeros(1, dtype=torch.int64, device=comm.device)
        variant = handshake_variant(comm.world_size, ptx=comm.device.type == "cuda")
        launcher.warm_up([variant])
        self._launch = launcher.prepare(handshake, 1, ONE_WARP, **dict[str, Any](variant.constants))
        comm.synchronize()

    def __call__(self) -> None:
        self._launch(self._bases, self._count, self._comm.world_size, self._comm.rank)

    def check(self) -> None:
        """Raises RuntimeError if a peer did not come. To be called once the device has run all launches."""
        if int(self._count) < 0:
            raise RuntimeError(f"rank {self._comm.rank}: a peer did not come to the handshake")


def handshake_variant(num_ranks: int, *, ptx: bool) -> Variant:
    """``ptx``: on a GPU, else interpreted."""
    return Variant.of(
        handshake,
        num_warps=ONE_WARP.num_warps,
        GROUP=1 << (num_ranks - 1).bit_length(),
        MOST_POLLS=GPU_POLLS if ptx else INTERPRETED_POLLS,
        PTX=ptx,
    )


@triton.jit(do_not_specialize=("size", "rank"))
def handshake(
    lane, table, size: tl.int64, rank: tl.int64, GROUP: tl.constexpr, MOST_POLLS: tl.constexpr, PTX: tl.constexpr
):
    """``lane``: addresses of all ranks' words; ``table``: how often it was launched, negative once one gave up."""
    number = tl.load(table) + 1
    peers = tl.arange(0, GROUP)
    others = (peers < size) & (peers != rank)
    bases = tl.load(lane + peers, mask=others, other=0)
    store_release_block(bases + rank * 8, tl.zeros((GROUP,), tl.int64) + number, others, PTX)
    own = tl.load(lane + rank)
    waiting, polls = others, 0
    while (tl.sum(waiting.to(tl.int32)) > 0) & (polls < MOST_POLLS):
        waiting = others & (load_acquire_block(own + peers * 8, waiting, PTX) < number) & waiting
        polls += 1
    tl.debug_barrier()
    tl.store(table, tl.where(tl.sum(waiting.to(tl.int32)) > 0, -(1 << 62), number))
