"""Artifacts across real processes: any fields, from one holder to newcomers, and a trajectory that goes on.

Over the host's transport and over kernels, which are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from gfdit.comm import CommTimeout, GroupFreeComm, SharedMemoryHeap, spawn
from gfdit.migration.parts import join_fields, split_fields
from gfdit.migration.transfer import (
    FIRST_BYTES,
    SMALL_BYTES,
    MigrationError,
    receive_artifact,
    send_artifact,
    send_failure,
)
from tests.comm.worlds import open_world
from tests.kernels.worlds import InterpretedHeap

CPU = torch.device("cpu")
both_transports = pytest.mark.parametrize("heap_class", [SharedMemoryHeap, InterpretedHeap])


def run_ranks(
    heap_class: type[SharedMemoryHeap], world_size: int, fn: Callable[..., Any], **options: Any
) -> list[Any]:
    sizes = {"slot_bytes": 256 * 1024, "low_latency_bytes": 64 * 1024}
    with open_world(world_size, **sizes) as world:
        world.start_all(fn, heap_class=heap_class, **options)
        return [world.result(rank, timeout_s=120) for rank in range(world_size)]


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


@both_transports
def test_every_kind_of_field_arrives_bit_identical(heap_class: type[SharedMemoryHeap]) -> None:
    assert run_ranks(heap_class, 3, copy_in_many_ways) == [[True] * 5] * 3


def count_messages(comm: GroupFreeComm, fields: dict[str, Any]) -> int:
    """How many broadcasts it takes to copy ``fields``."""
    with patch.object(comm, "broadcast", wraps=comm.broadcast) as broadcast:
        if comm.rank == 0:
            parts = split_fields(fields)
            send_artifact(comm, (0, 1), parts, parts.header())
        else:
            received = join_fields(receive_artifact(comm, (0, 1), CPU), CPU)
            assert same(received, fields)
            tensors = [tensor for tensor in received.values() if isinstance(tensor, torch.Tensor)]
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors), "keeps a message"
    return broadcast.call_count


def messages_by_size(comm: GroupFreeComm) -> list[int]:
    small = {f"{i}": torch.full((i, 3), i, dtype=torch.bfloat16) for i in range(20)}
    large = {f"large {i}": torch.arange(SMALL_BYTES + i) for i in range(2)}
    metadata = {"text": "x" * FIRST_BYTES}
    return [
        count_messages(comm, fields) for fields in ({}, small, {**small, **metadata}, {**large, **small}, large)
    ]


@both_transports
def test_a_small_artifact_takes_one_message(heap_class: type[SharedMemoryHeap]) -> None:
    assert run_ranks(heap_class, 2, messages_by_size) == [[1, 1, 2, 3, 3]] * 2


def sender_stops_halfway(comm: GroupFreeComm) -> None:
    """The receiver must not take for an artifact what it has until then."""
    if comm.rank == 0:
        preamble = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        preamble[:24] = torch.tensor([2 * FIRST_BYTES, 100, 0]).view(torch.uint8)
        comm.broadcast(preamble, 0, comm.group((0, 1)))
        return
    with pytest.raises(CommTimeout):
        receive_artifact(comm, (0, 1), CPU)


@both_transports
def test_a_sender_that_stops_halfway_is_a_timeout(heap_class: type[SharedMemoryHeap]) -> None:
    assert run_ranks(heap_class, 2, sender_stops_halfway, comm_timeout_s=2.0) == [None] * 2


def fail_then_send(comm: GroupFreeComm) -> list[str]:
    lane = comm.lane("migration")
    fields = {"x": torch.arange(3)}
    messages = ["latents cannot be pickled", "long: " + "x" * FIRST_BYTES]
    if comm.rank == 0:
        for message in messages:
            send_failure(lane, (0, 1), message)
        parts = split_fields(fields)
        send_artifact(lane, (0, 1), parts, parts.header())
        return messages
    received = []
    for _ in messages:
        with pytest.raises(MigrationError) as failure:
            receive_artifact(lane, (0, 1), CPU)
        received.append(str(failure.value))
    assert same(join_fields(receive_artifact(lane, (0, 1), CPU), CPU), fields)
    return received


@both_transports
def test_a_sender_that_cannot_send_says_so_and_the_edge_stays_usable(heap_class: type[SharedMemoryHeap]) -> None:
    sent, received = run_ranks(heap_class, 2, fail_then_send)
    assert sent == received


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
