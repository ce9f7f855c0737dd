"""What tasks take of a GPU's memory, as torch's allocator counts it, and how what a failed one took is given back.

The allocator works when a task is launched, not when the device runs it, so its counts between the launches of
two tasks are those of the first, whatever the device is at. What a copy that comes in meanwhile takes counts, too,
which is on the safe side. Never run on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm_omni.platforms import current_omni_platform

from gfdit.core.events import MemoryUse


class DeviceMeter:
    """Of one GPU, made once the model is loaded and before any task has run.

    ``use`` is that of the last task, None before the first. ``cuda`` is torch's module.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._weights_bytes: int = cuda.memory_allocated(device)
        free_bytes, _ = cuda.mem_get_info(device)
        self._capacity_bytes: int = free_bytes + cuda.memory_reserved(device)
        self.use: MemoryUse | None = None

    @contextmanager
    def task(self) -> Iterator[None]:
        """A task is launched inside; of one that fails nothing is known."""
        self.use = None
        self._cuda.reset_peak_memory_stats(self._device)
        before_bytes = self._cuda.memory_allocated(self._device)
        yield
        working_bytes = max(0, self._cuda.max_memory_allocated(self._device) - before_bytes)
        self.use = MemoryUse(self._capacity_bytes, self._weights_bytes, working_bytes)


def reclaim_memory() -> None:
    """Give back what nothing refers to any more, cycles and cached blocks included."""
    gc.collect()
    if current_omni_platform.is_available():
        current_omni_platform.empty_cache()
