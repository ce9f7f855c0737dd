"""What a collective costs the host: everything up to the launch of its kernel, which is replaced by nothing.

A model of 60 blocks has 120 exchanges of heads in a step, so tens of microseconds for each would be felt. Measured
without a GPU: the transport of kernels over a CPU heap, whose launcher takes the compiled form for granted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from gfdit.comm.group_free_comm import GroupFreeComm
from gfdit.comm.heap import Transport
from gfdit.comm.shared_memory_heap import SharedMemoryHeap
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES

NUM_RANKS = 4
BLOCKS = 60
# Of Qwen-Image at 1024 x 1024: (batch, tokens, heads, head size).
IMAGE_TOKENS, TEXT_TOKENS, HEADS, HEAD_SIZE = 4096, 512, 24, 128
_CALLS = 500


class NoKernels(SharedMemoryHeap):
    """Rank 0 of a heap whose peers are not there."""

    def open_lane(self, lane: str, *, timeout_s: float) -> Transport:  # type: ignore[override]
        self._lanes.open(lane)
        from gfdit.comm.kernel_transport import KernelTransport

        return KernelTransport(self, lane, timeout_s)


def measure_host(rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call, by operation and round; and of the exchanges of a step of ``BLOCKS`` blocks."""
    with without_kernels() as comm:
        return {name: [_microseconds(call) for _ in range(rounds)] for name, call in host_calls(comm).items()}


@contextmanager
def without_kernels() -> Iterator[GroupFreeComm]:
    """The communicator of rank 0, in whose launches everything is real but the launch itself."""
    from gfdit.kernels.launch import launcher

    def enqueue(num_programs: int, arguments: tuple[object, ...]) -> None:
        pass

    # As on a GPU, but for what no operation here would use: shared memory is scarce.
    sizes: dict[str, Any] = {**DEVICE_SIZES, "slot_bytes": 1 << 20, "place_bytes": 24 << 20, "scratch_bytes": 0}
    descriptor = SharedMemoryHeap.create(NUM_RANKS, **sizes)
    try:
        with patch.object(launcher, "_meet", lambda variant: enqueue):
            yield GroupFreeComm(NoKernels.attach(descriptor, 0))
    finally:
        descriptor.unlink()


def host_calls(comm: GroupFreeComm) -> dict[str, Callable[[], Any]]:
    group, own = comm.group(range(NUM_RANKS)), IMAGE_TOKENS // NUM_RANKS
    qkv = [torch.empty(1, own, HEADS, HEAD_SIZE, dtype=torch.bfloat16) for _ in range(3)]
    share = (1, IMAGE_TOKENS + TEXT_TOKENS, HEADS // NUM_RANKS, HEAD_SIZE)
    attended = torch.empty(share, dtype=torch.bfloat16)
    x, out = torch.empty(4096), torch.empty(NUM_RANKS * 4096)

    def beside_text() -> None:
        joint = comm.empty_for_heads((share,) * 3, torch.bfloat16)
        comm.scatter_heads(qkv, group, out=[tensor[:, TEXT_TOKENS:] for tensor in joint])

    def step() -> None:
        for _ in range(BLOCKS):
            beside_text()
            comm.gather_heads(attended[:, TEXT_TOKENS:], group)

    return {
        "barrier": lambda: comm.barrier(group),
        "all_gather": lambda: comm.all_gather_into_tensor(out, x, group),
        "all_to_all": lambda: comm.all_to_all_single(out, out.clone(), group),
        "all_reduce": lambda: comm.all_reduce(x, group),
        "send": lambda: comm.send(x, 1),
        "scatter of q, k, v": lambda: comm.scatter_heads(qkv, group),
        "scatter of q, k, v beside text": beside_text,
        "gather": lambda: comm.gather_heads(attended, group),
        f"exchanges of {BLOCKS} blocks": step,
    }


def _microseconds(call: Callable[[], Any]) -> float:
    call()
    begin = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - begin) / _CALLS * 1e6


def report(microseconds: Mapping[str, Sequence[float]]) -> list[str]:
    """A line per operation: median, smallest and largest round."""
    lines = []
    for name, values in microseconds.items():
        ordered = sorted(values)
        median = ordered[len(ordered) // 2]
        lines.append(f"{name:32} {median:9.1f} us of the host ({ordered[0]:.1f} to {ordered[-1]:.1f})")
    return lines
