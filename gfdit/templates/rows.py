"""From the store towards a device: rows of the tokens that are needed, gathered on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gfdit.templates.units import Unit


def gather(
    units: Sequence[Unit], rows: torch.Tensor, *, blocks: range | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Keys and values of some tokens, (blocks, heads, 2, N, head size) in the units' dtype, as ``rows`` says.

    A block's part is contiguous, so it can be copied to a device by itself. There ``part[:, 0].transpose(0, 1)``
    is K as (N, heads, head size), to be put into an attention's K with ``index_copy``.

    Args:
        units: Of consecutive heads, of one dtype and shape; rounded values stay so (see :func:`scales_of`).
        rows: int64 (N,), token indices.
        blocks: Which ones; all by default.
        out: Where to, contiguous, such as a pinned buffer; a new tensor by default.
    """
    first = units[0].values
    blocks = range(first.shape[0]) if blocks is None else blocks
    shape = (len(blocks), len(units), 2, rows.numel(), first.shape[3])
    if out is None:
        out = torch.empty(shape, dtype=first.dtype)
    assert out.shape == shape and out.dtype == first.dtype and out.is_contiguous()
    for place, block in enumerate(blocks):
        for head, unit in enumerate(units):
            # As bytes: indexing is not defined for float8 everywhere.
            torch.index_select(_raw(unit.values[block]), 1, rows, out=_raw(out[place, head]))
    return out


def scales_of(units: Sequence[Unit]) -> torch.Tensor | None:
    """What values gathered from ``units`` are to be multiplied by: float32 (blocks, heads, 2, 1, 1), or None."""
    if units[0].scales is None:
        return None
    scales = [unit.scales for unit in units if unit.scales is not None]
    assert len(scales) == len(units)
    return torch.stack(scales, 1)[..., None, None]


def _raw(values: torch.Tensor) -> torch.Tensor:
    """float8 as the bytes it is."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
