"""Memory for what migrations bring to a rank, taken once: no allocation waits for the device while it serves.

An allocation for which torch has no memory at hand asks the driver, which may wait for everything that runs on the
device, a collective that waits for this rank included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gfdit.comm.heap_tensors import HeapTensors

STAGING_BYTES = 256 << 20
"""Of a GPU: two or three requests of 81 frames of 1280x720, with their embeddings and solver history."""


class Staging:
    """Tensors on one device, cut from ``num_bytes`` that are taken at once; what does not fit is allocated.

    A piece is used again when no tensor views it any more. As with the heap's tensors, keep one until every other
    stream that uses it is done: an artifact is freed after the last task that reads it.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self.device = device
        self.num_allocated = 0  # tensors for which there was no room
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._pieces = HeapTensors(lambda: memory, num_bytes)
        self._num_bytes = num_bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous and uninitialised, with a storage of its own."""
        if self._num_bytes:
            try:
                return self._pieces.empty(shape, dtype)
            except ValueError:
                self.num_allocated += 1
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def free_bytes(self) -> int:
        """What no living tensor holds."""
        return self._pieces.free_bytes()
