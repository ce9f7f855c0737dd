"""Memory of migrations that is taken ahead: used, used again, and done without where it does not suffice."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gfdit.comm import GroupFreeComm
from gfdit.migration.staging import Staging
from gfdit.migration.transfer import migrate
from tests.comm.worlds import open_world
from tests.migration.test_transfer import CODEC, CPU, command_to, fields_of_every_kind, same

ROOM = 8 << 20


def test_pieces_are_used_again_once_nothing_views_them() -> None:
    staging = Staging(CPU, 4096)
    piece = staging.empty((1024,), torch.float32)
    view, address = piece[:7], piece.data_ptr()
    assert staging.free_bytes() == 0 and staging.num_allocated == 0
    del piece
    assert staging.empty((4,), torch.uint8).data_ptr() != address and staging.num_allocated == 1
    del view
    assert staging.empty((1024,), torch.float32).data_ptr() == address and staging.num_allocated == 1


def test_without_room_taken_ahead_everything_is_allocated() -> None:
    staging = Staging(CPU)
    assert staging.empty((2, 3), torch.bfloat16).shape == (2, 3) and staging.free_bytes() == 0


def copies(comm: GroupFreeComm, num_bytes: int) -> list[Any]:
    """Of three copies from rank 0 to rank 1: whether they are right, what they allocate and leave behind."""
    staging = Staging(CPU, num_bytes)
    lane = comm.lane("migration")
    seen = []
    torch.manual_seed(0)
    fields = fields_of_every_kind()
    for _ in range(3):
        arrived = migrate(
            lane, command_to(CODEC.view(fields), (0,), (1,)), lambda: CODEC.pack(fields), CPU, staging
        )
        held_bytes = num_bytes - staging.free_bytes()
        right = arrived is None or same(fields, CODEC.unpack(arrived.parts, CPU))
        large = arrived is not None and arrived.parts.tensors["large"]
        del arrived
        gc.collect()
        seen.append((right, staging.num_allocated, held_bytes > 2_800_000))
        del large
    gc.collect()
    return [*seen, staging.free_bytes()]


@pytest.mark.parametrize("num_bytes", [ROOM, 64 << 10])
def test_copies_allocate_only_what_finds_no_room(num_bytes: int) -> None:
    with open_world(2, slot_bytes=256 * 1024) as world:
        world.start_all(copies, num_bytes)
        sender, receiver = (world.result(rank, timeout_s=120) for rank in range(2))
    assert sender[-1] == receiver[-1] == num_bytes, "all of it is free again"
    assert all(right for right, *_ in receiver[:-1])
    if num_bytes == ROOM:
        assert [seen[1:] for seen in receiver[:-1]] == [(0, True)] * 3
        assert [allocated for _, allocated, _ in sender[:-1]] == [0, 0, 0]
    else:
        allocated = [num for _, num, _ in receiver[:-1]]
        assert allocated[0] > 0 and allocated == [allocated[0], 2 * allocated[0], 3 * allocated[0]]
