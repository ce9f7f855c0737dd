"""N virtual ranks in one process on one device: kernels and tests on a single GPU, or threads on a CPU.

On a CPU each virtual rank is a thread and the host moves the bytes. On a GPU each has a stream of its own and
kernels move them. Kernels of different ranks wait for each other, so they have to be on the device at the same
time: at most as many streams as the device runs side by side (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless set), and
nothing that makes the device idle first, such as loading a kernel or freeing memory, while another rank waits:
call ``warm_up`` first. What breaks this ends in CommTimeout, as everything does. Never run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gfdit.comm.described_heap import DescribedHeap
from gfdit.comm.futex import default_waiter
from gfdit.comm.heap import Transport
from gfdit.comm.heap_descriptor import DEFAULT_LANES, HeapDescriptor
from gfdit.comm.host_transport import HostTransport
from gfdit.comm.memory_order import memory_fence


@dataclass(frozen=True, slots=True)
class _World:
    """Shared by the virtual ranks; ``memory`` holds all segments, uint8."""

    descriptor: HeapDescriptor
    memory: torch.Tensor
    meeting: threading.Barrier


class LocalHeap(DescribedHeap):
    """One virtual rank's view of the common memory; see ``KernelHeap``. Make all of them with ``create``."""

    @classmethod
    def create(
        cls,
        world_size: int,
        *,
        device: torch.device | str = "cpu",
        lanes: Sequence[str] = DEFAULT_LANES,
        selector_table: str = "",
        **sizes: int,
    ) -> list[LocalHeap]:
        """The heaps of all virtual ranks, by rank. ``sizes``: those of ``HeapDescriptor``.

        Raises ValueError on bad arguments and for a device that is neither a CPU nor a CUDA device at hand.
        """
        device = checked_device(device)
        descriptor = HeapDescriptor.make("local", world_size, lanes, **sizes)
        memory = torch.zeros(world_size * descriptor.layout.segment_bytes, dtype=torch.uint8, device=device)
        descriptor = replace(descriptor, selector_table=selector_table)
        world = _World(descriptor, memory, threading.Barrier(world_size))
        return [cls(world, rank) for rank in range(world_size)]

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(world.descriptor, rank)
        self.device = world.memory.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._world = world

    def base_pointer(self, rank: int) -> int:
        return self._world.memory.data_ptr() + rank * self.layout.segment_bytes

    def segment(self, rank: int) -> torch.Tensor:
        begin = rank * self.layout.segment_bytes
        return self._world.memory[begin : begin + self.layout.segment_bytes]

    def open_lane(self, lane: str, *, timeout_s: float) -> Transport:
        lane_index = self._lanes.open(lane)
        if self.device.type == "cuda":
            # Imported here: it needs triton, which a machine without a GPU need not have.
            from gfdit.comm.kernel_transport import KernelTransport

            return KernelTransport(self, lane, timeout_s)
        return HostTransport(
            rank=self.rank,
            lane=lane,
            lane_index=lane_index,
            layout=self.layout,
            words=self._world.memory.numpy().data.cast("Q"),
            address=self._world.memory.data_ptr(),
            timeout_s=timeout_s,
            waiter=default_waiter(),
            fence=memory_fence(),
        )

    def meet(self) -> None:
        """Block this thread until those of all virtual ranks have come here: nothing on the device waits then.

        Raises threading.BrokenBarrierError once ``leave`` was called.
        """
        self._world.meeting.wait()

    def leave(self) -> None:
        """This rank will not meet the others again."""
        self._world.meeting.abort()


def checked_device(device: torch.device | str) -> torch.device:
    """A CPU, or a CUDA device at hand with its index. Raises ValueError in one clear line otherwise."""
    device = torch.device(device)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"a heap can be on 'cpu' or 'cuda', not on {device.type!r}")
    if not torch.cuda.is_available():
        raise ValueError("a heap on 'cuda' needs a CUDA device, and torch sees none")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"there is no {device}: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)
