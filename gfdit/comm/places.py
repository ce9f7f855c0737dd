"""Where peers put the heads that an exchange brings: some places in a rank's own segment, of one size everywhere.

What a place holds are the outputs of one exchange. It is free again when no tensor views its storage, which costs
less to see than memory costs to allocate. No device work: who fills it again is ordered behind who read it, if
both are on the lane's stream.

Peers must agree on whether they put heads into place or into data slots. So that this follows from sizes alone,
there is always a place: the last one is never handed out, and an exchange whose outputs are elsewhere, for
whatever reason, copies them out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gfdit.comm.heap import KernelHeap
from gfdit.comm.heap_tensors import with_own_storage
from gfdit.comm.layout import MAX_TENSORS, NUM_PLACES

# Of tensors within a place, in bytes.
_ALIGNMENT = 256


class Places:
    """Those of one rank, for the one lane that has them."""

    def __init__(self, heap: KernelHeap) -> None:
        layout = heap.layout
        self.num_bytes = layout.place_bytes
        segment = heap.segment(heap.rank)
        self._on_gpu = heap.device.type == "cuda"
        begins = [layout.place_offset(index) for index in range(NUM_PLACES)] if self.num_bytes else []
        self._places = [_Place(segment[begin : begin + self.num_bytes]) for begin in begins]

    def hold(self, tensor_bytes: Sequence[int]) -> bool:
        """Whether one place has room for tensors of these sizes."""
        return len(tensor_bytes) <= MAX_TENSORS and sum(map(_aligned, tensor_bytes)) <= self.num_bytes

    def take(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[torch.Tensor, ...] | None:
        """Dense tensors in a free place, uninitialised; None if there is none, or no room in it.

        None while a graph is captured, too: its replays would fill the place at any time.
        """
        if not self.hold([math.prod(shape) * dtype.itemsize for shape in shapes]):
            return None
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        free = next((place for place in self._places[:-1] if place.is_free()), None)
        return free.tensors(shapes, dtype) if free else None

    def spare(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The same in the place that is never handed out: until the next exchange."""
        return self._places[-1].tensors(shapes, dtype)


class _Place:
    def __init__(self, region: torch.Tensor) -> None:
        memory = with_own_storage(region)
        self._storage = memory.untyped_storage()
        self._typed = {memory.dtype: memory}
        self._own_uses = self._uses()

    def is_free(self) -> bool:
        return self._uses() == self._own_uses

    def tensors(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        flat = self._typed.get(dtype)
        if flat is None:
            flat = self._typed[dtype] = self._typed[torch.uint8].view(dtype)
            self._own_uses += 1
        begin, made = 0, []
        for shape in shapes:
            strides, num_elements = [], 1
            for extent in reversed(shape):
                strides.append(num_elements)
                num_elements *= extent
            made.append(torch.as_strided(flat, shape, strides[::-1], begin))
            begin += _aligned(num_elements * dtype.itemsize) // dtype.itemsize
        return tuple(made)

    def _uses(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
