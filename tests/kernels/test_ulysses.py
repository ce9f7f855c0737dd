"""The head exchange of Ulysses attention by one kernel, interpreted in rank processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gfdit.comm import GroupFreeComm
from gfdit.comm.choice import Choice, Path, Situation
from gfdit.comm.heap import Operation
from gfdit.comm.heap_tensors import segment_addresses
from gfdit.comm.layout import NUM_PLACES
from tests.comm.head_programs import cases, every_subset
from tests.comm.test_heads import UNEVEN
from tests.comm.worlds import open_world
from tests.kernels.worlds import InterpretedHeap


@pytest.mark.parametrize(("world_size", "num_groups"), [(2, 2), pytest.param(3, 10, marks=pytest.mark.thorough)])
def test_every_ordered_subset(world_size: int, num_groups: int) -> None:
    with open_world(world_size, slot_bytes=512) as world:
        world.start_all(every_subset, (2, 6, (2, 1), 16, torch.bfloat16), heap_class=InterpretedHeap)
        assert [world.result(rank, timeout_s=200) for rank in range(world_size)] == [num_groups] * world_size


@pytest.mark.thorough
def test_four_ranks_uneven_and_large() -> None:
    several = [*[(b, (*t, 3), (*u, 1), h, d, dtype) for b, t, u, h, d, dtype in UNEVEN]]
    several.append((1, (64,) * 4, (6,) * 4, (1, 1, 1), 128, torch.bfloat16))  # Qwen-Image's 24 heads of 128
    with open_world(4, slot_bytes=65536) as world:
        world.start_all(cases, (2, 0, 3, 1), several, heap_class=InterpretedHeap)
        assert [world.result(rank, timeout_s=200) for rank in range(4)] == [None] * 4


def into_place(comm: GroupFreeComm, path: Path, program: Any, *args: Any) -> Any:
    """``program`` with every exchange of heads by ``path`` where sizes allow it."""
    selector: Any = comm.selector
    taken: list[Path] = []

    def choose(situation: Situation) -> Choice:
        heads = situation.operation in (Operation.SCATTER_HEADS, Operation.GATHER_HEADS)
        taken.append(path if heads and situation.target_in_heap else Path.PUSH)
        return Choice(taken[-1], 256, situation.group_size)

    selector.force(choose)
    result = program(comm, *args)
    assert path in taken
    return result


@pytest.mark.thorough
def test_straight_into_place() -> None:
    even = (2, (6,) * 3, (1,) * 3, (2, 1, 1), 16, torch.bfloat16)
    with open_world(3, slot_bytes=512, place_bytes=1 << 16) as world:
        several = [even, UNEVEN[0]]
        world.start_all(into_place, Path.DIRECT_PUSH, cases, (2, 0, 1), several, heap_class=InterpretedHeap)
        assert world.results() == [None] * 3


def test_by_copy_engines() -> None:
    several = [(b, t[:2], u[:2], h, d, dtype) for b, t, u, h, d, dtype in UNEVEN]
    with open_world(2, slot_bytes=512, place_bytes=1 << 16) as world:
        world.start_all(into_place, Path.COPY_ENGINE, cases, (1, 0), several, heap_class=InterpretedHeap)
        assert world.results() == [None] * 2


def places_kept(comm: GroupFreeComm) -> list[bool]:
    """Outputs that are still in use are not overwritten by later ones, in however many exchanges."""
    group, selector = comm.group((0, 1)), comm.selector
    assert selector is not None
    selector.force(lambda situation: Choice(Path.DIRECT_PUSH, 256, 1))
    kept: list[torch.Tensor] = []
    for number in range(2 * NUM_PLACES):
        heads = torch.full((1, 4, 2, 16), float(number))
        kept += comm.scatter_heads([heads], group)
    reach = segment_addresses(comm.heap)  # type: ignore[arg-type]
    assert [int(x.unique()) for x in kept] == list(range(2 * NUM_PLACES))
    in_place = [x.data_ptr() in reach for x in kept]
    del kept
    again = comm.scatter_heads([torch.ones(1, 4, 2, 16)], group)
    return [*in_place, again[0].data_ptr() in reach]


def test_a_place_in_use_is_left_alone() -> None:
    with open_world(2, place_bytes=4096) as world:
        world.start_all(places_kept, heap_class=InterpretedHeap)
        wanted = [number < NUM_PLACES - 1 for number in range(2 * NUM_PLACES)]
        assert world.results() == [[*wanted, True]] * 2


def one_without_room(comm: GroupFreeComm) -> list[torch.Tensor]:
    """One rank's outputs are in place, the other's are not: peers need not know."""
    group, selector = comm.group((0, 1)), comm.selector
    assert selector is not None
    selector.force(lambda situation: Choice(Path.DIRECT_PUSH, 256, 1))
    heads = torch.arange(2 * 4 * 2 * 16, dtype=torch.float32).view(2, 4, 2, 16) + 1000 * comm.rank
    out = [torch.empty(2, 8, 1, 16)] if comm.rank else None
    (scattered,) = comm.scatter_heads([heads], group, out=out)
    assert (scattered.data_ptr() in segment_addresses(comm.heap)) is (comm.rank == 0)  # type: ignore[arg-type]
    return [scattered.clone(), comm.gather_heads(scattered, group).clone()]


def test_a_rank_may_have_no_free_place() -> None:
    with open_world(2, place_bytes=4096) as world:
        world.start_all(one_without_room, heap_class=InterpretedHeap)
        results = world.results()
    given = [torch.arange(2 * 4 * 2 * 16, dtype=torch.float32).view(2, 4, 2, 16) + 1000 * rank for rank in (0, 1)]
    for rank, (scattered, gathered) in enumerate(results):
        assert torch.equal(scattered, torch.cat(given, dim=1)[:, :, rank : rank + 1])
        assert torch.equal(gathered, given[rank])
