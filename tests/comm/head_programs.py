"""What ranks do to test head exchanges, on any transport. The reference slices inputs that every rank can make."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from gfdit.comm import GroupFreeComm
from tests.comm.worlds import random_tensor, same_bits, stale

# (batch, tokens by position, head units by position, heads of a unit by tensor, head size, dtype)
Case = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, torch.dtype]


def check_case(comm: GroupFreeComm, ranks: tuple[int, ...], case: Case, key: int) -> None:
    """Scatter, compare; gather what was scattered, compare with what it came from."""
    batch, tokens, units, unit_heads, head_size, dtype = case
    group = comm.group(ranks)
    me = group.index
    inputs = [
        [
            random_tensor((batch, length, sum(units) * heads, head_size), dtype, key, position, number)
            for number, heads in enumerate(unit_heads)
        ]
        for position, length in enumerate(tokens)
    ]
    even = len(set(tokens)) == len(set(units)) == 1
    options: dict[str, Any] = (
        {} if even else {"tokens": tokens, "heads": [unit * min(unit_heads) for unit in units]}
    )
    scattered = comm.scatter_heads(inputs[me], group, **options)
    for number, heads in enumerate(unit_heads):
        whole = torch.cat([of_member[number] for of_member in inputs], dim=1)
        begin = sum(units[:me]) * heads
        wanted = whole[:, :, begin : begin + units[me] * heads]
        assert same_bits(scattered[number], wanted), f"scatter {case} in {ranks}"
        # Into the middle of a larger tensor, from a tensor with other strides.
        room = stale((batch, sum(tokens) + 3, units[me] * heads, head_size), dtype)
        again = comm.scatter_heads([_restrided(inputs[me][number])], group, **options, out=[room[:, 2:-1]])
        assert same_bits(again[0], wanted), f"strided scatter {case} in {ranks}"
        assert same_bits(room[:, :2], stale(tuple(room[:, :2].shape), dtype)), "wrote outside"
        # The same where peers can write, if there is such a place.
        (place,) = comm.empty_for_heads([room.shape], dtype)
        place.copy_(stale(tuple(room.shape), dtype))
        again = comm.scatter_heads([inputs[me][number]], group, **options, out=[place[:, 2:-1]])
        assert same_bits(again[0], wanted), f"scatter into place {case} in {ranks}"
        for edge in (place[:, :2], place[:, -1:]):
            assert same_bits(edge, stale(tuple(edge.shape), dtype)), "wrote beside its place"
        heads_of: dict[str, Any] = {} if even else {"tokens": tokens, "heads": [unit * heads for unit in units]}
        back = comm.gather_heads(scattered[number], group, **heads_of)
        assert same_bits(back, inputs[me][number]), f"gather {case} in {ranks}"
    replicated = comm.gather_heads(
        scattered[0], group, heads=None if even else [unit * unit_heads[0] for unit in units], replicated=True
    )
    assert same_bits(replicated, torch.cat([of_member[0] for of_member in inputs], dim=1)), f"replicated {case}"


def every_subset(comm: GroupFreeComm, case: tuple[int, int, tuple[int, ...], int, torch.dtype]) -> int:
    """One even case in every ordered subset of the world that has two ranks or more."""
    batch, length, unit_heads, head_size, dtype = case
    count = 0
    for size in range(2, comm.world_size + 1):
        for ranks in itertools.permutations(range(comm.world_size), size):
            if comm.rank in ranks:
                check_case(comm, ranks, (batch, (length,) * size, (1,) * size, unit_heads, head_size, dtype), size)
                count += 1
    return count


def cases(comm: GroupFreeComm, ranks: tuple[int, ...], several: list[Case]) -> None:
    for number, case in enumerate(several):
        if comm.rank in ranks:
            check_case(comm, ranks, case, number)


def _restrided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the strides of a slice of something larger."""
    larger = tensor.new_zeros((tensor.shape[0], tensor.shape[1] + 2, tensor.shape[2] + 1, tensor.shape[3]))
    view = larger[:, 1:-1, : tensor.shape[2]]
    view.copy_(tensor)
    return view
