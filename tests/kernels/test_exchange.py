"""All-gather, all-to-all and barrier by the kernels that the rules choose, interpreted in rank processes."""

from __future__ import annotations

import itertools

import pytest
import torch

from gfdit.comm import GroupFreeComm
from tests.comm.worlds import open_world, random_bytes, same_bits, stale
from tests.kernels.worlds import InterpretedHeap


def all_subsets(comm: GroupFreeComm, num_bytes: int) -> int:
    """Every ordered subset of the world gathers and exchanges; returns how many this rank was in."""
    taken = 0
    for size in range(1, comm.world_size + 1):
        for ranks in itertools.permutations(range(comm.world_size), size):
            if comm.rank not in ranks:
                continue
            group = comm.group(ranks)
            out = stale((size * num_bytes,), torch.uint8)
            comm.all_gather_into_tensor(out, random_bytes(num_bytes, taken_key(ranks), comm.rank), group)
            wanted = [random_bytes(num_bytes, taken_key(ranks), rank) for rank in ranks]
            assert same_bits(out, torch.cat(wanted)), f"all-gather in {ranks}"
            comm.all_to_all_single(out, random_bytes(size * num_bytes, taken_key(ranks), comm.rank), group)
            wanted = [
                random_bytes(size * num_bytes, taken_key(ranks), rank).chunk(size)[group.index] for rank in ranks
            ]
            assert same_bits(out, torch.cat(wanted)), f"all-to-all in {ranks}"
            comm.barrier(group)
            taken += 1
    return taken


def taken_key(ranks: tuple[int, ...]) -> int:
    return sum((rank + 1) * 7**place for place, rank in enumerate(ranks))


@pytest.mark.parametrize(
    ("world_size", "num_subsets_with_a_rank"), [(3, 11), pytest.param(4, 49, marks=pytest.mark.thorough)]
)
def test_every_ordered_subset(world_size: int, num_subsets_with_a_rank: int) -> None:
    with open_world(world_size, slot_bytes=1024) as world:
        world.start_all(all_subsets, 37, heap_class=InterpretedHeap)
        results = [world.result(rank, timeout_s=240) for rank in range(world_size)]
    assert results == [num_subsets_with_a_rank] * world_size
