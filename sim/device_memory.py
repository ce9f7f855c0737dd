"""Memory of simulated devices: what tasks take of it, told to the control plane as ranks would."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gfdit.core import ParallelSpec, TaskKind, TaskView
from gfdit.core.events import MemoryUse

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """``capacity_gib`` of every rank, of which the model takes ``weights_gib``. A denoising step takes
    ``mib_per_token`` more for each nominal token that a rank has at a time; other tasks take nothing.

    Raises ``ValueError`` for numbers that cannot be, and for weights that do not fit.
    """

    capacity_gib: float
    weights_gib: float
    mib_per_token: float

    def __post_init__(self) -> None:
        for name in ("capacity_gib", "weights_gib", "mib_per_token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a non-negative number, got {value}")
        if self.weights_gib > self.capacity_gib:
            raise ValueError(f"weights of {self.weights_gib} GiB do not fit into {self.capacity_gib} GiB")

    @classmethod
    def parse(cls, text: str) -> DeviceMemory:
        """``GIB,WEIGHTS_GIB,MIB_PER_TOKEN``."""
        try:
            capacity_gib, weights_gib, mib_per_token = map(float, text.split(","))
        except ValueError:
            raise ValueError(f"a device's memory must be GIB,WEIGHTS_GIB,MIB_PER_TOKEN, got {text!r}") from None
        return cls(capacity_gib, weights_gib, mib_per_token)

    def use(self, task: TaskView, spec: ParallelSpec, batch: int) -> MemoryUse:
        num_tokens = task.shape.num_tokens * batch / spec.sp if task.kind is TaskKind.DENOISE else 0.0
        working_bytes = int(num_tokens * self.mib_per_token * 2**20)
        return MemoryUse(int(self.capacity_gib * _GIB), int(self.weights_gib * _GIB), working_bytes)

    def is_too_large(self, use: MemoryUse) -> bool:
        return use.weights_bytes + use.working_bytes > use.capacity_bytes
