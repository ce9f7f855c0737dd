"""The CUDA heap: a segment per GPU in torch's symmetric memory, one process per GPU, kernels move the data.

One rendezvous of the world at start, nothing per group. The ranks of a world work on GPUs of one machine
(``gfdit.comm.devices``); each must be able to address every other one's memory. Never run on a GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace

import torch

from gfdit.comm.cuda_setup import prepare_process
from gfdit.comm.described_heap import DescribedHeap
from gfdit.comm.devices import check_devices, check_peer_access, names_of, own_device
from gfdit.comm.heap import Transport
from gfdit.comm.heap_descriptor import DEFAULT_LANES, HeapDescriptor
from gfdit.comm.torch_symmetric_memory import map_segments

_RENDEZVOUS_TIMEOUT_S = 300.0
# For eight GPUs and three lanes some 730 MiB each. Slots: so large that an exchange of heads of Qwen-Image at 1024
# x 1024 on four ranks (4.7 MB for each peer) is one round, whose chunks are drained while others are pushed.
# Places: query, key and value of 14,000 tokens with 6 heads of 128.
DEVICE_SIZES = {
    "slot_bytes": 8 << 20,
    "low_latency_bytes": 64 << 10,
    "export_bytes": 16 << 20,
    "multicast_bytes": 1 << 20,
    "place_bytes": 64 << 20,
    "scratch_bytes": 64 << 20,
}


class TorchSymmetricHeap(DescribedHeap):
    """A ``KernelHeap``; make one with ``create`` + ``attach``."""

    @classmethod
    def create(
        cls,
        world_size: int,
        *,
        lanes: Sequence[str] = DEFAULT_LANES,
        devices: Sequence[str | int] = (),
        **sizes: int,
    ) -> HeapDescriptor:
        """Describe a heap of ``world_size`` GPUs; memory is taken when they attach. ``unlink`` it in the end.

        ``devices``: one for each rank, see ``gfdit.comm.devices``; by default rank ``r`` works on device ``r``.
        ``sizes``: those of ``HeapDescriptor``, by default ``DEVICE_SIZES``. Raises ValueError, in one clear
        line, on bad arguments and if this machine cannot do it.
        """
        prepare_process()
        names = names_of(devices, world_size)
        check_devices(world_size, names)
        descriptor = HeapDescriptor.make("torch_symmetric", world_size, lanes, **{**DEVICE_SIZES, **sizes})
        file, path = tempfile.mkstemp(prefix="gfdit-rendezvous-")
        os.close(file)
        return replace(descriptor, path=path, devices=names)

    @classmethod
    def attach(cls, descriptor: HeapDescriptor, rank: int) -> TorchSymmetricHeap:
        """Take this rank's memory on its device, which becomes the current one, and map everybody's.

        Every rank calls it at the same time. Raises ValueError as ``create`` does.
        """
        prepare_process()
        descriptor.check_rank(rank)
        if not descriptor.devices:
            check_devices(descriptor.world_size)
        device = own_device(rank, descriptor.devices)
        check_peer_access(rank, descriptor.world_size, descriptor.devices)
        torch.cuda.set_device(device)
        return cls(descriptor, rank, device)

    def __init__(
        self, descriptor: HeapDescriptor, rank: int, device: torch.device, symmetric_memory: object = None
    ) -> None:
        """``symmetric_memory``: see ``map_segments``."""
        super().__init__(descriptor, rank)
        self.device = device
        self._segments = map_segments(
            self.layout.segment_bytes,
            device,
            rank=rank,
            world_size=descriptor.world_size,
            store_path=descriptor.path,
            timeout_s=_RENDEZVOUS_TIMEOUT_S,
            symmetric_memory=symmetric_memory,
        )
        self.multicast_pointer = self._segments.multicast_pointer

    def base_pointer(self, rank: int) -> int:
        return self._segments.by_rank[rank].data_ptr()

    def segment(self, rank: int) -> torch.Tensor:
        """All of ``rank``'s segment, uint8, on this rank's device."""
        return self._segments.by_rank[rank]

    def open_lane(self, lane: str, *, timeout_s: float) -> Transport:
        # Imported here: it needs triton, which a machine without a GPU need not have.
        from gfdit.comm.kernel_transport import KernelTransport

        self._lanes.open(lane)
        return KernelTransport(self, lane, timeout_s)
