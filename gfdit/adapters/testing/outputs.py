"""What a pipeline returns, as arrays that can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput


@dataclass(frozen=True)
class Output:
    """The arrays of a ``DiffusionOutput`` by name, as the pipeline returned them.

    That is before they are made into pictures or reduced for transport: what differs by less than a grey level
    differs here. ``forwards`` counts the calls of the transformer in each step, on the first rank of its layout;
    it is empty for the stock pipeline.
    """

    arrays: Mapping[str, np.ndarray]
    forwards: tuple[int, ...] = ()

    @classmethod
    def of(cls, result: DiffusionOutput) -> Output:
        """Raises ``ValueError`` for a result without any array, or that says an error."""
        if result.error:
            raise ValueError(f"the pipeline says: {result.error}")
        named = "media" if result.media is not None else "output"
        arrays = dict(_arrays(named, getattr(result, named)))
        if not arrays:
            raise ValueError("the pipeline returned neither tensors nor images")
        return cls(arrays)

    @property
    def array(self) -> np.ndarray:
        """The only array, or the first."""
        return next(iter(self.arrays.values()))

    def identical(self, other: Output) -> bool:
        """Bit for bit, shapes and dtypes included."""
        return self._alike(other) and all(
            array.tobytes() == other.arrays[name].tobytes() for name, array in self.arrays.items()
        )

    def difference(self, other: Output) -> float:
        """Largest absolute difference of an element; infinite where shapes differ or something is not a number."""
        if not self._alike(other):
            return float("inf")
        largest = [
            float(np.abs(array.astype(np.float64) - other.arrays[name].astype(np.float64)).max(initial=0.0))
            for name, array in self.arrays.items()
        ]
        worst = max(largest)
        return worst if worst == worst and all(value == value for value in largest) else float("inf")

    def distance(self, other: Output) -> float:
        """Root mean square difference, of the array furthest apart; infinite as for :meth:`difference`."""
        if not np.isfinite(self.difference(other)):
            return float("inf")
        return max(
            float(np.sqrt(np.mean((array.astype(np.float64) - other.arrays[name].astype(np.float64)) ** 2)))
            for name, array in self.arrays.items()
            if array.size
        )

    @property
    def finite(self) -> bool:
        return all(bool(np.isfinite(array).all()) for array in self.arrays.values() if array.dtype.kind == "f")

    @property
    def spread(self) -> float:
        """Standard deviation of the elements of the array that has most."""
        return float(max(self.arrays.values(), key=lambda array: array.size).astype(np.float64).std())

    def _alike(self, other: Output) -> bool:
        return [(name, array.shape, array.dtype) for name, array in self.arrays.items()] == [
            (name, array.shape, array.dtype) for name, array in other.arrays.items()
        ]


def _arrays(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        # numpy has no bfloat16; widening loses nothing.
        yield name, (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy().copy()
    elif isinstance(value, np.ndarray):
        yield name, value
    elif hasattr(value, "getbands"):  # a PIL image
        yield name, np.asarray(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _arrays(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _arrays(f"{name}.{index}", inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for spec in dataclasses.fields(value):
            yield from _arrays(f"{name}.{spec.name}", getattr(value, spec.name))
