"""Whole migrations of latents from layout to layout, as workers do them. Needs msgspec, as gfdit.core does."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.ranks import same_bits, together
from gfdit.comm import GroupFreeComm
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.artifacts.views import inside
from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.migration.codec import Artifact, FieldCodec, Sharding
from gfdit.migration.parts import ArtifactParts
from gfdit.migration.transfer import migrate

_CHANNELS = 64


def _on(*ranks: int) -> ExecutionLayout:
    return ExecutionLayout(ranks, ParallelSpec(len(ranks)))


# By name: from which layout to which, and whether the latents are split over its ranks.
MOVES = {
    "from 1 rank to another": (_on(0), _on(1), False),
    "from 1 rank to 4": (_on(0), _on(0, 1, 2, 3), False),
    "split, from 2 ranks to 4": (_on(0, 1), _on(0, 1, 2, 3), True),
    "split, from 4 ranks to 2": (_on(0, 1, 2, 3), _on(0, 1), True),
}


def migration_rank(comm: GroupFreeComm, num_bytes: int, rounds: int) -> list[list[float]]:
    """Seconds by move and round. Raises AssertionError if other bytes arrive than were sent."""
    tokens = max(num_bytes // (2 * _CHANNELS) // 8 * 8, 8)
    generator = torch.Generator(comm.device).manual_seed(11)
    whole = torch.randn((1, tokens, _CHANNELS), generator=generator, device=comm.device).bfloat16()
    times: list[list[float]] = []
    for before, after, sharded in MOVES.values():
        codec = FieldCodec({"latents": Sharding("shape", sp_dim=1)} if sharded else None)
        command = _command(codec, whole, before, after)
        for number in range(rounds + 1):
            seconds = [] if number == 0 else times[-1]  # the first is not counted
            seconds.append(_once(comm, command, codec, whole, before))
            if number == 0:
                times.append([])
    return times


def _command(codec: FieldCodec, whole: torch.Tensor, before: ExecutionLayout, after: ExecutionLayout) -> Migrate:
    view = codec.view(_fields(whole, whole))
    held = dict.fromkeys(before.ranks, before)
    plan = plan_transfers(view, held, after)
    holders = tuple((rank, held[rank]) for rank in plan.ranks if rank in held)
    return Migrate(1, "r", "r/latents/7", plan.ranks, plan.transfers, after, holders, view)


def _fields(latents: torch.Tensor, whole: torch.Tensor) -> Artifact:
    return {"latents": latents, "shape": tuple(whole.shape), "step_index": 7}


def _once(
    comm: GroupFreeComm, command: Migrate, codec: FieldCodec, whole: torch.Tensor, before: ExecutionLayout
) -> float:
    field = command.view.fields[0]

    def export() -> ArtifactParts:
        parts = codec.pack(_fields(whole[inside(field.whole, field.box(before, comm.rank))].contiguous(), whole))
        parts.layout = before
        return parts

    comm.synchronize()
    together(comm)
    begin = time.perf_counter()
    arrived = migrate(comm, command, export, comm.device) if comm.rank in command.ranks else None
    seconds = time.perf_counter() - begin
    if arrived is not None:
        brought = codec.unpack(arrived.parts, comm.device)["latents"]
        wanted = whole[inside(field.whole, field.box(command.target, comm.rank))]
        if not same_bits(brought, wanted):
            raise AssertionError(f"rank {comm.rank}: other latents than were sent")
    return seconds
