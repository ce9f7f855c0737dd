"""Artifacts across real processes: any fields, from one holder to newcomers, and a trajectory that goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gfdit.comm import GroupFreeComm, spawn
from gfdit.migration.parts import join_fields, split_fields
from gfdit.migration.transfer import MigrationError, receive_artifact, send_artifact, send_failure

CPU = torch.device("cpu")


def fields_of_every_kind() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    torch.randn(11, generator=generator)  # the stream is somewhere in the middle
    return {
        "latents": torch.randn(1, 64, 16),
        "strided": torch.arange(24.0).reshape(4, 6).T,
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "large": torch.randn(700_001),
        "generator": generator,
        "step_index": 5,
        "nested": {"sigmas": np.linspace(0, 1, 9), "history": [torch.ones(2), None]},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def copy_between(comm: GroupFreeComm, ranks: tuple[int, ...]) -> bool:
    if comm.rank not in ranks:
        return True
    torch.manual_seed(0)
    fields = fields_of_every_kind()
    lane = comm.lane("migration")
    if comm.rank == ranks[0]:
        parts = split_fields(fields)
        send_artifact(lane, ranks, parts, parts.header())
        return True
    return same(fields, join_fields(receive_artifact(lane, ranks, CPU), CPU))


def copy_in_many_ways(comm: GroupFreeComm) -> list[bool]:
    groups = [(0, 1), (2, 0), (1, 2, 0), (0, 2, 1), (2, 1)]
    return [copy_between(comm, ranks) for ranks in groups]


def test_every_kind_of_field_arrives_bit_identical() -> None:
    assert spawn(copy_in_many_ways, 3, timeout_s=60) == [[True] * 5] * 3


def fail_then_send(comm: GroupFreeComm) -> str:
    lane = comm.lane("migration")
    fields = {"x": torch.arange(3)}
    if comm.rank == 0:
        send_failure(lane, (0, 1), "latents cannot be pickled")
        parts = split_fields(fields)
        send_artifact(lane, (0, 1), parts, parts.header())
        return ""
    with pytest.raises(MigrationError) as failure:
        receive_artifact(lane, (0, 1), CPU)
    assert same(join_fields(receive_artifact(lane, (0, 1), CPU), CPU), fields)
    return str(failure.value)


def test_a_sender_that_cannot_send_says_so_and_the_edge_stays_usable() -> None:
    assert spawn(fail_then_send, 2, timeout_s=60)[1] == "latents cannot be pickled"


def walk(scheduler: Any, latents: torch.Tensor, generator: torch.Generator, steps: range) -> torch.Tensor:
    """A multistep, stochastic trajectory: every step needs solver history and random numbers."""
    for index in steps:
        noise = torch.tanh(latents) + 0.1 * torch.randn(latents.shape, generator=generator)
        latents = scheduler.step(noise, scheduler.timesteps[index], latents, return_dict=False)[0]
    return latents


def start() -> tuple[Any, torch.Tensor, torch.Generator]:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(solver_order=3, prediction_type="flow_prediction", use_flow_sigmas=True)
    scheduler.set_timesteps(12)
    generator = torch.Generator().manual_seed(3)
    return scheduler, torch.randn(1, 8, 8, generator=generator), generator


def relay(comm: GroupFreeComm) -> torch.Tensor | None:
    """Rank 0 walks 5 steps, rank 1 goes on for 4, rank 0 finishes: what a request does when ranks change."""
    from gfdit.omni.plugin import prepare_cpu_process

    prepare_cpu_process()
    lane = comm.lane("migration")
    legs = [(0, range(5)), (1, range(5, 9)), (0, range(9, 12))]
    fields: dict[str, Any] = {}
    if comm.rank == 0:
        fields = dict(zip(("scheduler", "latents", "generator"), start(), strict=True))
    holder = 0
    for rank, steps in legs:
        if rank != holder:
            ranks = (holder, rank)
            if comm.rank == holder:
                parts = split_fields(fields)
                send_artifact(lane, ranks, parts, parts.header())
                fields = {}
            else:
                fields = join_fields(receive_artifact(lane, ranks, CPU), CPU)
            holder = rank
        if comm.rank == rank:
            fields["latents"] = walk(fields["scheduler"], fields["latents"], fields["generator"], steps)
    return fields.get("latents")


def test_solver_history_and_generator_migrate_so_that_a_trajectory_is_bit_identical() -> None:
    scheduler, latents, generator = start()
    alone = walk(scheduler, latents, generator, range(12))
    assert len(scheduler.model_outputs) == 3, "the solver keeps history, or this test proves nothing"
    moved = spawn(relay, 2, timeout_s=120)[0]
    assert torch.equal(moved, alone)
    fresh, latents, generator = start()
    half = walk(fresh, latents, generator, range(5))
    forgetful, *_ = start()  # negative control: the same latents and generator without the solver's history
    forgetful._step_index = fresh._step_index
    assert not torch.equal(walk(forgetful, half, generator, range(5, 12)), alone)
