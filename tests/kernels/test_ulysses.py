"""The head exchange of Ulysses attention by one kernel, interpreted in rank processes."""

from __future__ import annotations

import pytest
import torch

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
