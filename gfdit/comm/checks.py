"""Validation of what the user passes, before anything is communicated. All errors are ValueError."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_tensor(name: str, tensor: torch.Tensor, device: torch.device, *, contiguous: bool) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, this communicator works on {device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} is written to and must be contiguous; got strides {tensor.stride()}")


def check_same_dtype(out: torch.Tensor, x: torch.Tensor) -> None:
    if out.dtype != x.dtype:
        raise ValueError(f"output dtype {out.dtype} differs from input dtype {x.dtype}")


def check_gathered_shape(out: torch.Tensor, x: torch.Tensor, group_size: int) -> None:
    """``out``: (group_size * x.shape[0], ...) or (group_size, *x.shape), as in torch.distributed."""
    concatenated = (group_size * x.shape[0], *x.shape[1:]) if x.ndim else (group_size,)
    stacked = (group_size, *x.shape)
    if tuple(out.shape) not in (concatenated, stacked):
        raise ValueError(
            f"output of shape {tuple(out.shape)} cannot hold {group_size} inputs of shape {tuple(x.shape)}: "
            f"expected {concatenated} or {stacked}"
        )


def check_disjoint(out: torch.Tensor, x: torch.Tensor) -> None:
    """An all-to-all in place would overwrite rows it has not sent yet."""
    begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
    if begin < out.data_ptr() + out.nbytes and out.data_ptr() < end:
        raise ValueError("output and input of an all-to-all must not overlap")


def row_splits(name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, group_size: int) -> list[int]:
    """Rows of ``tensor`` (dim 0) per group position; equal parts when ``sizes`` is None."""
    if not tensor.ndim:
        raise ValueError(f"{name} must have at least one dimension")
    num_rows = tensor.shape[0]
    if sizes is None:
        if num_rows % group_size:
            raise ValueError(f"{name} has {num_rows} rows, which {group_size} ranks cannot share equally")
        return [num_rows // group_size] * group_size
    splits = [int(size) for size in sizes]
    if len(splits) != group_size or min(splits) < 0 or sum(splits) != num_rows:
        raise ValueError(
            f"{name} has {num_rows} rows: expected {group_size} non-negative splits that add up to it, "
            f"got {splits}"
        )
    return splits
