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
from dataclasses import dataclass
from pathlib import Path

import torch

from gfdit.comm.futex import default_waiter
from gfdit.comm.heap import Transport
from gfdit.comm.heap_descriptor import DEFAULT_LANES, DEFAULT_SLOT_BYTES, HeapDescriptor, Lanes
from gfdit.comm.heap_tensors import HeapTensors
from gfdit.comm.host_transport import HostTransport
from gfdit.comm.memory_order import memory_fence
from gfdit.comm.selector_table import SelectorTable


@dataclass(frozen=True, slots=True)
class _World:
    """Shared by the virtual ranks; ``memory`` holds all segments, uint8."""

    descriptor: HeapDescriptor
    memory: torch.Tensor
    selector_table: SelectorTable | None
    meeting: threading.Barrier


class LocalHeap:
    """One virtual rank's view of the common memory; see ``KernelHeap``. Make all of them with ``create``."""

    multicast_pointer = 0

    @classmethod
    def create(
        cls,
        world_size: int,
        *,
        device: torch.device | str = "cpu",
        lanes: Sequence[str] = DEFAULT_LANES,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        selector_table: str = "",
        **sizes: int,
    ) -> list[LocalHeap]:
        """The heaps of all virtual ranks, by rank. ``sizes``: the other sizes of ``SharedMemoryHeap.create``.

        Raises ValueError on bad arguments and for a device that is neither a CPU nor a CUDA device at hand.
        """
        device = checked_device(device)
        descriptor = HeapDescriptor.make("local", world_size, lanes, slot_bytes=slot_bytes, **sizes)
        memory = torch.zeros(world_size * descriptor.layout.segment_bytes, dtype=torch.uint8, device=device)
        table = SelectorTable.load(Path(selector_table)) if selector_table else None
        world = _World(descriptor, memory, table, threading.Barrier(world_size))
        return [cls(world, rank) for rank in range(world_size)]

    def __init__(self, world: _World, rank: int) -> None:
        self.rank = rank
        self.device = world.memory.device
        self.layout = world.descriptor.layout
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._world = world
        self._lanes = Lanes(rank, world.descriptor.lanes)
        self.tensors = HeapTensors(self._scratch, self.layout.scratch_bytes)

    @property
    def world_size(self) -> int:
        return self._world.descriptor.world_size

    @property
    def session(self) -> int:
        return self._world.descriptor.session

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._world.descriptor.lanes

    @property
    def selector_table(self) -> SelectorTable | None:
        return self._world.selector_table

    def base_pointer(self, rank: int) -> int:
        return self._world.memory.data_ptr() + rank * self.layout.segment_bytes

    def segment(self, rank: int) -> torch.Tensor:
        """All of ``rank``'s segment, uint8."""
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

    def close(self) -> None:
        """No lane can be opened any more; the memory goes with the last rank that uses it."""
        self._lanes.closed = True

    def _scratch(self) -> torch.Tensor:
        begin = self.layout.scratch_offset
        return self.segment(self.rank)[begin : begin + self.layout.scratch_bytes]


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
