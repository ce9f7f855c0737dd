"""The heaps that ranks in processes of their own can share, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gfdit.comm.heap import SymmetricHeap
from gfdit.comm.heap_descriptor import DEFAULT_LANES, HeapDescriptor
from gfdit.comm.interpreted_heap import InterpretedHeap
from gfdit.comm.shared_memory_heap import SharedMemoryHeap
from gfdit.comm.torch_symmetric_heap import TorchSymmetricHeap

HEAPS: dict[str, Any] = {
    "shared_memory": SharedMemoryHeap,
    "interpreted": InterpretedHeap,
    "torch_symmetric": TorchSymmetricHeap,
}


def create_heap(
    kind: str,
    world_size: int,
    *,
    lanes: Sequence[str] = DEFAULT_LANES,
    selector_table: str = "",
    devices: Sequence[str | int] = (),
    **sizes: int,
) -> HeapDescriptor:
    """Reserve a heap; the caller owns it and must ``unlink`` the descriptor. ``sizes``: see the heap's ``create``.

    ``devices``: one for each rank, where ranks are on GPUs. Raises ValueError for an unknown kind or bad
    arguments, OSError if the memory is not there.
    """
    if kind not in HEAPS:
        raise ValueError(f"unknown heap {kind!r}; known: {', '.join(map(repr, HEAPS))}")
    if devices and kind != "torch_symmetric":
        raise ValueError(f"devices are for ranks on GPUs: the heap {kind!r} is on the CPU")
    options: dict[str, Any] = {"devices": devices} if devices else {}
    descriptor = HEAPS[kind].create(world_size, lanes=lanes, **options, **sizes)
    return replace(descriptor, kind=kind, selector_table=selector_table)


def attach_heap(descriptor: HeapDescriptor, rank: int) -> SymmetricHeap:
    """The heap as ``rank`` sees it, in this process. On CUDA all ranks attach at once, each on its device."""
    return HEAPS[descriptor.kind].attach(descriptor, rank)
