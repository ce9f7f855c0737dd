"""all_reduce with a sum in group order, so that every member gets the same bits; as exchanges plus a sum."""

from __future__ import annotations

import torch

from gfdit.comm.group import Group
from gfdit.comm.heap import Call, Plan, Transport
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

    def plan(self, call: Call, num_elements: int, dtype: torch.dtype, group: Group) -> Plan:
        """Of one (elements,), contiguous: becomes the sum over the members, in place."""
        if (in_one_go := self._transport.plan_all_reduce(call, num_elements, dtype)) is not None:
            return in_one_go
        num_bytes = num_elements * dtype.itemsize
        if num_bytes <= _GATHER_LIMIT_BYTES:
            return self._plan_gather(call, num_bytes, group)
        block = _BLOCK_BYTES // dtype.itemsize
        sizes = dict.fromkeys([block, num_elements % block] if num_elements >= block else [num_elements])
        by_size = {size: self._plan_parts(call, size, dtype, group) for size in sizes if size}

        def run(flat: torch.Tensor) -> None:
            for part in flat.split(block):
                by_size[part.numel()](part)

        return run

    def _plan_gather(self, call: Call, num_bytes: int, group: Group) -> Plan:
        """Everybody sums everything: one exchange."""
        none, all_bytes = [0] * len(group), [num_bytes] * len(group)
        pieces = [p._replace(send_bytes=num_bytes) for p in consecutive_slices(group, none, all_bytes)]
        exchange = self._transport.plan_exchange(call._replace(num_bytes=num_bytes), pieces)

        def run(flat: torch.Tensor) -> None:
            gathered = self._parts(flat, len(group), flat.numel())
            exchange(flat, gathered)
            flat.copy_(sum_in_order(gathered))

        return run

    def _plan_parts(self, call: Call, num_elements: int, dtype: torch.dtype, group: Group) -> Plan:
        """Each member sums one part and passes the sum on: less traffic, one more exchange."""
        sizes = split_evenly(num_elements, len(group))
        part_bytes = [size * dtype.itemsize for size in sizes]
        mine = [part_bytes[group.index]] * len(group)
        call = call._replace(num_bytes=part_bytes[0])
        scatter = self._transport.plan_exchange(call, consecutive_slices(group, part_bytes, mine))
        # Every byte of the block left in the first exchange, so the sums can come back in its place.
        pieces = [piece._replace(send_offset=0) for piece in consecutive_slices(group, mine, part_bytes)]
        gather = self._transport.plan_exchange(call, pieces)

        def run(block: torch.Tensor) -> None:
            parts = self._parts(block, len(group), sizes[group.index])
            scatter(block, parts)
            gather(sum_in_order(parts), block)

        return run

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
