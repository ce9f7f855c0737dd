"""Tensors inside a rank's own segment: peers read and write them directly, so collectives stage nothing.

They are cut from the scratch region of the segment by the host, first fit, and return to it when the last tensor
that views them is gone. No device work: what reuses the memory is ordered after what used it before if both are
on the stream, as with PyTorch's own allocator. Keep a tensor until every other stream that uses it is done.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gfdit.comm.heap import KernelHeap

# As PyTorch aligns; kernels want 16.
_ALIGNMENT = 256


class HeapTensors:
    """Allocates from one rank's scratch region. Threads may share it.

    ``region`` gives the region, uint8 of ``num_bytes``; it is asked at every allocation, so that nothing but live
    tensors keeps the memory mapped.
    """

    def __init__(self, region: Callable[[], torch.Tensor], num_bytes: int) -> None:
        self._region = region
        self._num_bytes = num_bytes
        self._free = [(0, num_bytes)] if num_bytes else []  # begin and end of free ranges, in order
        # Tensors die at any time, even inside ``empty``: what they leave is collected by the next one.
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, uninitialised, at an address that is a multiple of 256 if that of the segment is.

        Raises ValueError when no free range is large enough.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        wanted = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._collect()
            begin = self._take(wanted)
            if begin is None:
                largest = max((end - begin for begin, end in self._free), default=0)
                raise ValueError(
                    f"no room in the heap for a tensor of {tuple(shape)} {dtype}, {num_bytes} bytes: "
                    f"{self._free_bytes()} of {self._num_bytes} bytes are free, {largest} of them in a row; "
                    "enlarge scratch_bytes"
                )
        memory = with_own_storage(self._region()[begin : begin + wanted], self._returned, (begin, begin + wanted))
        return memory[:num_bytes].view(dtype).view(tuple(shape))

    def free_bytes(self) -> int:
        """What no living tensor holds."""
        with self._lock:
            self._collect()
            return self._free_bytes()

    def _free_bytes(self) -> int:
        return sum(end - begin for begin, end in self._free)

    def _take(self, wanted: int) -> int | None:
        """Begin of a free range of ``wanted`` bytes, which is no longer free; None if there is none."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= wanted:
                self._free[index : index + 1] = [(begin + wanted, end)] if end - begin > wanted else []
                return begin
        return None

    def _collect(self) -> None:
        """Merge what was returned into the free ranges."""
        if not self._returned:
            return
        while self._returned:
            insort(self._free, self._returned.popleft())
        merged = self._free[:1]
        for begin, end in self._free[1:]:
            if begin == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged


def heap_addresses(heap: KernelHeap) -> range:
    """Addresses of the bytes that this rank's heap tensors are made of."""
    begin = heap.base_pointer(heap.rank) + heap.layout.scratch_offset
    return range(begin, begin + heap.layout.scratch_bytes)


def segment_addresses(heap: KernelHeap) -> range:
    """Addresses of everything that this rank's peers can reach."""
    begin = heap.base_pointer(heap.rank)
    return range(begin, begin + heap.layout.segment_bytes)


def with_own_storage(
    region: torch.Tensor, returned: deque[tuple[int, int]] | None = None, extent: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """A tensor of the same bytes with a storage of its own: once that is gone, ``extent`` is in ``returned``."""
    owner: Any
    if region.is_cuda:
        owner = _CudaArray(region)
        memory = torch.as_tensor(owner, device=region.device)
    else:
        owner = (ctypes.c_uint8 * region.nbytes).from_address(region.data_ptr())
        memory = torch.frombuffer(owner, dtype=torch.uint8)
    # The storage holds the owner, the finalizer holds the region and with it the mapping.
    weakref.finalize(owner, _give_back, region, returned, extent).atexit = False
    return memory


def _give_back(region: torch.Tensor, returned: deque[tuple[int, int]] | None, extent: tuple[int, int]) -> None:
    if returned is not None:
        returned.append(extent)


class _CudaArray:
    """Device memory as PyTorch takes it from others. Never run on a GPU."""

    def __init__(self, region: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.data_ptr(), False),
            "version": 3,
        }
