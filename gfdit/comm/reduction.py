"""The arithmetic of all_reduce: a sum in group order, so that every member gets the same bits."""

from __future__ import annotations

import torch

# Below this one exchange of everything beats two exchanges of parts.
GATHER_LIMIT_BYTES = 64 * 1024

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_SUMMABLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)


def check_summable(x: torch.Tensor) -> None:
    if x.dtype not in _SUMMABLE:
        raise ValueError(f"all_reduce cannot sum {x.dtype}")


def sum_in_order(parts_GN: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape suffix: group, elements
    """Sum over dim 0, row by row. Half-precision types are added in float32 and rounded once.

    Shape: (group, elements) -> (elements,), dtype of the input.
    """
    dtype = parts_GN.dtype
    total = parts_GN[0].to(_WIDER.get(dtype, dtype), copy=True)
    for part in parts_GN[1:]:
        total += part
    return total.to(dtype)


def split_evenly(num_elements: int, num_parts: int) -> list[int]:
    """Part sizes that differ by one at most, larger ones first."""
    size, extra = divmod(num_elements, num_parts)
    return [size + (index < extra) for index in range(num_parts)]
