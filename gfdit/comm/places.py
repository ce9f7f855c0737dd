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
from collections.abc import Callable, Sequence

import torch

from gfdit.comm.heap import KernelHeap
from gfdit.comm.heap_tensors import with_own_storage
from gfdit.comm.layout import MAX_TENSORS, NUM_PLACES

Tensors = tuple[torch.Tensor, ...]
_View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, stride and offset, in elements."""

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

    def plan(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Callable[[], Tensors | None]:
        """Dense tensors in a free place, uninitialised, each time it is called; None if there is no such place.

        None while a graph is captured, too: its replays would fill the place at any time.
        """
        if not self.hold([math.prod(shape) * dtype.itemsize for shape in shapes]):
            return lambda: None
        views, on_gpu, places = _views(shapes, dtype), self._on_gpu, self._places[:-1]

        def take() -> Tensors | None:
            if on_gpu and torch.cuda.is_current_stream_capturing():
                return None
            for place in places:
                if place.is_free():
                    return place.tensors(views, dtype)
            return None

        return take

    def spare(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensors:
        """The same in the place that is never handed out: until the next exchange."""
        return self._places[-1].tensors(_views(shapes, dtype), dtype)


def spare_of(heap: KernelHeap, rank: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensors:
    """What ``Places.spare`` is on ``rank``, which this one can write."""
    begin = heap.layout.place_offset(NUM_PLACES - 1)
    flat = heap.segment(rank)[begin : begin + heap.layout.place_bytes].view(dtype)
    first = flat.storage_offset()
    return tuple([flat.as_strided(size, stride, first + at) for size, stride, at in _views(shapes, dtype)])


class _Place:
    def __init__(self, region: torch.Tensor) -> None:
        memory = with_own_storage(region)
        self._storage = memory.untyped_storage()
        self._typed = {memory.dtype: memory}
        self._own_uses = self._uses()

    def is_free(self) -> bool:
        return self._uses() == self._own_uses

    def tensors(self, views: Sequence[_View], dtype: torch.dtype) -> Tensors:
        flat = self._typed.get(dtype)
        if flat is None:
            flat = self._typed[dtype] = self._typed[torch.uint8].view(dtype)
            self._own_uses += 1
        return tuple([flat.as_strided(*view) for view in views])

    def _uses(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))


def _views(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[_View]:
    """Dense tensors one behind the other."""
    begin, views = 0, []
    for shape in shapes:
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        views.append((tuple(meta.shape), meta.stride(), begin))
        begin += _aligned(meta.nbytes) // dtype.itemsize
    return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
