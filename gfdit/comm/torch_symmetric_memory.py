"""The one place that touches torch's symmetric memory: its interface is not stable yet (torch 2.11 to 2.15).

Only the CUDA backend is used, and only to have every rank's memory mapped in every process: signals are our own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class MappedSegments:
    """``by_rank``: all ranks' memory as this process sees it, uint8. ``handle`` keeps it mapped.

    ``multicast_pointer``: where a store reaches all of them; 0 if the hardware has no multicast.
    """

    by_rank: tuple[torch.Tensor, ...]
    multicast_pointer: int
    handle: Any


def map_segments(
    num_bytes: int,
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    store_path: str,
    timeout_s: float,
    symmetric_memory: Any = None,
) -> MappedSegments:
    """Allocate ``num_bytes`` of zeros on ``device`` and map those of all ranks; every rank calls it, once.

    ``store_path`` is a file that all of them can write. ``symmetric_memory`` is torch's module. Never run on a
    GPU. Raises RuntimeError if torch maps memory in a way not known here.
    """
    module = symmetric_memory or importlib.import_module("torch.distributed._symmetric_memory")
    module.set_backend("CUDA")
    own = module.empty(num_bytes, dtype=torch.uint8, device=device)
    # Torch does not clear it, and whoever has mapped it may write: so before the rendezvous, and done by then.
    own.zero_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with world_group(rank, world_size, store_path, timeout_s) as group:
        allow_same_index(device, group)
        handle = module.rendezvous(own, group)
    by_rank = tuple(handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(world_size))
    if by_rank[rank].data_ptr() != own.data_ptr():
        raise RuntimeError(f"torch {torch.__version__} maps symmetric memory elsewhere than it was allocated")
    return MappedSegments(by_rank, int(handle.multicast_ptr or 0), (own, handle))


def allow_same_index(device: torch.device, group: Any) -> None:
    """Where two ranks' devices have the same index in their processes, tell torch that this is meant.

    They share a device, or each process sees another one under that index; torch refuses both unless it is told,
    and then does without multicast. Every rank of ``group`` calls it.
    """
    indices: list[int | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(indices, device.index, group=group)
    if len(set(indices)) < len(indices):
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


@contextlib.contextmanager
def world_group(rank: int, world_size: int, store_path: str, timeout_s: float) -> Iterator[Any]:
    """A process group of all ranks, for the rendezvous alone; the existing one if there is one.

    Raises ValueError if the existing one has other ranks.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(
                f"rank {rank} of {world_size} cannot use the existing process group, in which it is rank "
                f"{dist.get_rank()} of {dist.get_world_size()}"
            )
        yield dist.group.WORLD
        return
    store = dist.FileStore(store_path, world_size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
