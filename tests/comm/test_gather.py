"""Tensors of many shapes from all members of a group to its first."""

from __future__ import annotations

import pytest
import torch

from gfdit.comm import CommTimeout, GroupFreeComm
from gfdit.comm.gather import gather_to_first
from gfdit.comm.group import Group, make_group
from tests.comm.worlds import run_ranks, run_virtual_ranks, same_bits

# By position: the shapes it brings. One brings nothing, one a scalar and an empty tensor.
SHAPES = (((3, 4), (2, 3, 5)), (), ((), (0, 7), (300,)), ((2, 2),))


def brought(position: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(position)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES[position]]


def gathered(comm: GroupFreeComm, ranks: tuple[int, ...], dtype: torch.dtype) -> bool:
    group = comm.group(ranks)
    counts = [len(shapes) for shapes in SHAPES]
    found = gather_to_first(comm, brought(group.index, dtype), counts, group)
    comm.barrier(group)  # nothing is left on the edges
    if group.index:
        return found is None
    assert found is not None
    return all(
        tensor.shape == expected.shape and same_bits(tensor, expected)
        for position, tensors in enumerate(found)
        for tensor, expected in zip(tensors, brought(position, dtype), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_any_order_of_ranks(dtype: torch.dtype) -> None:
    for ranks in ((0, 1, 2, 3), (2, 3, 0, 1)):
        assert all(run_virtual_ranks(gathered, 4, ranks, dtype))


def test_between_processes_in_several_rounds() -> None:
    assert all(run_ranks(gathered, 4, (3, 0, 2, 1), torch.float32, slot_bytes=128))


def refusals(comm: GroupFreeComm) -> list[str]:
    group, tensor = comm.group((0, 1)), torch.zeros(2)
    texts = []
    for tensors, counts in (([tensor], [2, 2]), ([], [0, 0]), ([tensor], [1, 1, 1])):
        with pytest.raises(ValueError) as caught:
            gather_to_first(comm, tensors, counts, group)
        texts.append(str(caught.value))
    comm.barrier(group)
    return texts


def test_a_wrong_number_is_refused_before_anything_is_sent() -> None:
    for texts in run_virtual_ranks(refusals, 2):
        assert "brings 1 tensors, counts [2, 2]" in texts[0]
        assert "brings 0 tensors" in texts[1]


class LateFailure:
    """A communicator of a device: what failed shows once it is waited for, and what was to arrive is anything."""

    device = torch.device("cpu")

    def all_gather_into_tensor(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        out.fill_(1 << 40)

    def synchronize(self) -> None:
        raise CommTimeout(0, (1, 0), 1, 0, "compute", "all_gather")


def test_sizes_that_did_not_arrive_are_not_allocated() -> None:
    group = make_group((0, 1), rank=0, world_size=2, session=1)
    with pytest.raises(CommTimeout):
        gather_to_first(LateFailure(), [torch.zeros(3)], [1, 1], group)  # type: ignore[arg-type]
