"""all_reduce with a sum in group order, so that every member gets the same bits; as exchanges plus a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gfdit.comm.group import Group
from gfdit.comm.heap import Call, PeerSlice, Transport
from gfdit.comm.slices import consecutive_slices

# Up to here one exchange of everything beats two exchanges of parts.
_GATHER_LIMIT_BYTES = 64 * 1024
# Larger tensors go block by block through a workspace that stays in cache and is never paged in again.
_BLOCK_BYTES = 512 * 1024

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
    """Raises ValueError for dtypes without a sum (bool, fp8, complex)."""
    if x.dtype not in _SUMMABLE:
        raise ValueError(f"all_reduce cannot sum {x.dtype}")


class OrderedSum:
    """Sums over groups on one lane. Owns a workspace of a few blocks that grows to what was needed once."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)

    def all_reduce(self, call: Call, flat: torch.Tensor, group: Group) -> None:
        """``flat`` := the sum over the members, in place. Shape: (elements,), contiguous."""
        if self._transport.all_reduce(call, flat):
            return
        if flat.nbytes <= _GATHER_LIMIT_BYTES:
            self._gather_and_sum(call, flat, group)
            return
        for block in flat.split(_BLOCK_BYTES // flat.element_size()):
            self._sum_parts(call, block, group)

    def _gather_and_sum(self, call: Call, flat: torch.Tensor, group: Group) -> None:
        """Everybody sums everything: one exchange."""
        gathered = self._parts(flat, len(group), flat.numel())
        none, all_bytes = [0] * len(group), [flat.nbytes] * len(group)
        pieces = [p._replace(send_bytes=flat.nbytes) for p in consecutive_slices(group, none, all_bytes)]
        self._transport.exchange(call._replace(num_bytes=flat.nbytes), flat, gathered, pieces)
        flat.copy_(sum_in_order(gathered))

    def _sum_parts(self, call: Call, block: torch.Tensor, group: Group) -> None:
        """Each member sums one part and passes the sum on: less traffic, one more exchange."""
        sizes = split_evenly(block.numel(), len(group))
        part_bytes = [size * block.element_size() for size in sizes]
        mine = [part_bytes[group.index]] * len(group)
        call = call._replace(num_bytes=part_bytes[0])
        parts = self._parts(block, len(group), sizes[group.index])
        self._transport.exchange(call, block, parts, consecutive_slices(group, part_bytes, mine))
        # Every byte of the block left in the first exchange, so the sums can come back in its place.
        pieces: Sequence[PeerSlice] = consecutive_slices(group, mine, part_bytes)
        pieces = [piece._replace(send_offset=0) for piece in pieces]
        self._transport.exchange(call, sum_in_order(parts), block, pieces)

    def _parts(self, like: torch.Tensor, num_parts: int, num_elements: int) -> torch.Tensor:
        """Uninitialised (parts, elements) of the workspace, in the dtype of ``like``."""
        num_bytes = num_parts * num_elements * like.element_size()
        if self._workspace.nbytes < num_bytes:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return self._workspace[:num_bytes].view(like.dtype).view(num_parts, num_elements)


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0, row by row; may overwrite row 0. Half precision is added in float32, rounded once.

    Shape: (parts, elements) -> (elements,), contiguous, same dtype.
    """
    wider = _WIDER.get(parts.dtype)
    total = parts[0] if wider is None else parts[0].to(wider)
    for part in parts[1:]:
        total += part
    return total if wider is None else parts[0].copy_(total)


def split_evenly(num_elements: int, num_parts: int) -> list[int]:
    """Part sizes that differ by one at most, larger ones first."""
    size, extra = divmod(num_elements, num_parts)
    return [size + (index < extra) for index in range(num_parts)]
