"""Artifacts of random fields walk from layout to layout over the real transport, and stay what they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gfdit.comm import CommError, GroupFreeComm, spawn
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.artifacts.views import ArtifactView, Box, FieldView
from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.migration import transfer
from gfdit.migration.parts import ArtifactParts
from gfdit.migration.transfer import migrate
from tests.migration.artifacts import Held, lacking, layouts, num_bytes, views
from tests.support.waiting import HANG_S

CPU = torch.device("cpu")
NUM_RANKS = 4
METADATA = b"solver, generator and step" * 5
WALKS = st.lists(layouts(NUM_RANKS), min_size=2, max_size=4)


RING = [ExecutionLayout((0, 1, 2), ParallelSpec(3)), ExecutionLayout((2, 0, 1), ParallelSpec(3))]
TOKENS = ArtifactView((FieldView("tokens", "int64", 8, (3000,), sp_dim=0, on_host=True),))


def whole(field: FieldView, index: int) -> torch.Tensor:
    """The global tensor, as any rank can make it."""
    generator = torch.Generator().manual_seed(index)
    num_elements = torch.Size(field.shape).numel()
    if field.dtype == "bool":
        return torch.randint(0, 2, (num_elements,), generator=generator).bool().view(field.shape)
    data = torch.randint(0, 256, (num_elements * field.item_bytes,), generator=generator, dtype=torch.uint8)
    return data.view(getattr(torch, field.dtype)).view(field.shape)


def slice_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(*part) for part in box)]


def parts_under(view: ArtifactView, layout: ExecutionLayout, rank: int) -> ArtifactParts:
    tensors = {f.name: slice_of(whole(f, i), f.box(layout, rank)) for i, f in enumerate(view.fields)}
    return ArtifactParts(METADATA, tensors, layout)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(one: ArtifactParts, other: ArtifactParts) -> bool:
    """Bit for bit: random bits are often no number, which equals nothing."""
    return one.metadata == other.metadata and all(
        tensor.shape == other.tensors[name].shape and bits(tensor) == bits(other.tensors[name])
        for name, tensor in one.tensors.items()
    )


def commands(view: ArtifactView, walk: list[ExecutionLayout]) -> list[Migrate]:
    """From each layout of ``walk`` to the next; ranks that it leaves keep what they have, and may send it."""
    held: Held = dict.fromkeys(walk[0].ranks, walk[0])
    made = []
    for number, target in enumerate(walk[1:]):
        plan = plan_transfers(view, held, target)
        holders = tuple((rank, held[rank]) for rank in plan.ranks if rank in held)
        made.append(Migrate(number, "r", "r/x", plan.ranks, plan.transfers, target, holders, view))
        held |= dict.fromkeys(target.ranks, target)
    return made


def run_walk(comm: GroupFreeComm, view: ArtifactView, walk: list[ExecutionLayout]) -> list[int]:
    """Bytes of tensors that came to this rank, by migration."""
    lane = comm.lane("migration")
    mine = parts_under(view, walk[0], comm.rank) if comm.rank in walk[0].ranks else None
    came = []
    for command in commands(view, walk):
        came.append(0)
        if comm.rank in command.ranks:
            was_newcomer = mine is None

            def export(parts: ArtifactParts | None = mine) -> ArtifactParts:
                assert parts is not None
                return parts

            arrived = migrate(lane, command, export, CPU)
            if arrived is not None:
                mine, came[-1] = arrived.parts, arrived.num_bytes - len(METADATA) * was_newcomer
        if comm.rank in command.target.ranks:
            assert mine is not None and same(mine, parts_under(view, command.target, comm.rank))
    return came


@contextmanager
def small_messages() -> Iterator[None]:
    """So that small artifacts take every way that large ones take."""
    with ExitStack() as stack:
        for name, value in {"SMALL_BYTES": 32, "METADATA_ROOM": 48}.items():
            stack.enter_context(patch.object(transfer, name, value))
        yield


@settings(max_examples=60)
@given(view=views(), walk=WALKS)
def test_there_and_back_again_every_bit_is_the_same(view: ArtifactView, walk: list[ExecutionLayout]) -> None:
    walk = [*walk, walk[0]]
    with small_messages():
        came = spawn(run_walk, NUM_RANKS, heap="local", args=(view, walk), slot_bytes=64, comm_timeout_s=HANG_S)
    held: Held = dict.fromkeys(walk[0].ranks, walk[0])
    for number, target in enumerate(walk[1:]):
        needed = lacking(view, held, target)
        expected = [num_bytes(view, needed.get(rank, set())) for rank in range(NUM_RANKS)]
        assert [by_rank[number] for by_rank in came] == expected
        held |= dict.fromkeys(target.ranks, target)


def meet_late(comm: GroupFreeComm, others_are_done: threading.Event) -> None:
    """Rank 1 comes to its migration with rank 0 only when that of ranks 2 and 3 is done."""
    pairs = [(0, 1), (2, 3)]
    lane = comm.lane("migration")
    source, target = next(pair for pair in pairs if comm.rank in pair)
    (command,) = commands(TOKENS, [ExecutionLayout((source,)), ExecutionLayout((target,))])
    parts = parts_under(TOKENS, ExecutionLayout((source,)), source)
    if comm.rank == 1:
        assert others_are_done.wait(HANG_S)
    migrate(lane, command, lambda: parts, CPU)
    if comm.rank == 3:
        others_are_done.set()


def test_migrations_of_different_ranks_run_at_the_same_time() -> None:
    spawn(meet_late, 4, heap="local", args=(threading.Event(),), slot_bytes=64, comm_timeout_s=HANG_S)


def run_in_own_order(comm: GroupFreeComm, stubborn: int) -> None:
    """Rank ``stubborn`` takes its transfers the other way round."""
    (command,) = commands(TOKENS, RING)
    order = command.transfers[:: -1 if comm.rank == stubborn else 1]
    parts = parts_under(TOKENS, RING[0], comm.rank)
    migrate(comm.lane("migration"), replace(command, transfers=order), lambda: parts, CPU)


def test_ranks_with_an_order_of_their_own_are_stopped() -> None:
    """Negative control: the order of the plan is what keeps ranks from waiting for each other."""
    came = spawn(run_walk, 3, heap="local", args=(TOKENS, RING), slot_bytes=64)
    assert came == [[8000]] * 3
    first, _, last = commands(TOKENS, RING)[0].transfers
    (both,) = set(first.ranks) & set(last.ranks)
    with pytest.raises(CommError):
        spawn(run_in_own_order, 3, heap="local", args=(both,), slot_bytes=64, comm_timeout_s=1)
