"""Any number of tensors of any shapes, from every member of a group to its first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gfdit.comm.group import Group
from gfdit.comm.group_free_comm import GroupFreeComm

_MAX_DIMS = 8


def gather_to_first(
    comm: GroupFreeComm, tensors: Sequence[torch.Tensor], counts: Sequence[int], group: Group
) -> list[list[torch.Tensor]] | None:
    """The tensors of every member, by position, on the first member of ``group``; None on the others.

    Position ``i`` brings ``counts[i]`` tensors, the first member at least one; all are of one dtype, with at most
    8 dimensions. Raises ``ValueError`` for another number of them. The shapes travel first, so the first member
    waits for its device.
    """
    if len(tensors) != counts[group.index] or len(counts) != len(group) or not counts[0]:
        raise ValueError(f"position {group.index} of {len(group)} brings {len(tensors)} tensors, counts {counts}")
    shapes = _all_shapes(comm, tensors, max(counts), group)
    if group.index:
        if tensors:
            comm.send(torch.cat([tensor.reshape(-1) for tensor in tensors]), group.ranks[0])
        return None
    gathered = [list(tensors)]
    for position in range(1, len(group)):
        wanted = [torch.Size(row[1 : 1 + row[0]]) for row in shapes[position, : counts[position]].tolist()]
        sizes = [shape.numel() for shape in wanted]
        flat = tensors[0].new_empty(sum(sizes))
        if wanted:
            comm.recv(flat, group.ranks[position])
        gathered.append([part.view(shape) for part, shape in zip(flat.split(sizes), wanted, strict=True)])
    return gathered


def _all_shapes(
    comm: GroupFreeComm, tensors: Sequence[torch.Tensor], max_count: int, group: Group
) -> torch.Tensor:
    """(members, ``max_count``, 1 + 8) int64: of each tensor its number of dimensions and their sizes."""
    rows = torch.zeros((max_count, 1 + _MAX_DIMS), dtype=torch.int64)
    for row, tensor in zip(rows, tensors, strict=False):
        row[0] = tensor.ndim
        row[1 : 1 + tensor.ndim] = torch.tensor(tensor.shape)
    rows = rows.to(comm.device)
    gathered = rows.new_empty((len(group), *rows.shape))
    comm.all_gather_into_tensor(gathered, rows, group)
    if group.index:
        return gathered
    comm.synchronize()  # sizes that did not arrive are anything
    return gathered.cpu()
