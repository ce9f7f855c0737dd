"""Artifacts across real processes: any fields, from holders to newcomers, and a trajectory that goes on.

Over the host's transport and over kernels, which are interpreted.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from gfdit.comm import CommTimeout, GroupFreeComm, SharedMemoryHeap
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.migration.codec import FieldCodec, Sharding
from gfdit.migration.parts import ArtifactParts
from gfdit.migration.tensor_fields import NESTED_BYTES, tensor_fields
from gfdit.migration.transfer import METADATA_ROOM, SMALL_BYTES, MigrationError, migrate
from tests.comm.worlds import open_world
from tests.kernels.worlds import InterpretedHeap
from tests.support.thorough import thorough

CPU = torch.device("cpu")
both_transports = pytest.mark.parametrize("heap_class", [SharedMemoryHeap, *thorough([InterpretedHeap])])


def run_ranks(
    heap_class: type[SharedMemoryHeap], world_size: int, fn: Callable[..., Any], **options: Any
) -> list[Any]:
    sizes = {"slot_bytes": 256 * 1024, "low_latency_bytes": 64 * 1024}
    with open_world(world_size, **sizes) as world:
        world.start_all(fn, heap_class=heap_class, **options)
        return world.results()


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
        "nested": {"sigmas": np.linspace(0, 1, 9), "history": [torch.ones(2), None, torch.randn(20_000)]},
    }


CODEC = FieldCodec()


def command_to(view: ArtifactView, sources: tuple[int, ...], newcomers: tuple[int, ...]) -> Migrate:
    """``sources`` hold all of an artifact; ``newcomers`` have to, too, under a layout of them alone."""
    target = ExecutionLayout(newcomers, ParallelSpec(len(newcomers)))
    held = dict.fromkeys(sources, ExecutionLayout(sources, ParallelSpec(len(sources))))
    plan = plan_transfers(view, held, target, idle=sources)
    return Migrate(1, "r", "r/x", plan.ranks, plan.transfers, target, tuple(held.items()), view)


def bring(comm: GroupFreeComm, ranks: tuple[int, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` from ``ranks[0]`` to the others; a receiver returns what came, all know what is in them."""
    command = command_to(CODEC.view(fields), ranks[:1], ranks[1:])
    arrived = migrate(comm, command, lambda: CODEC.pack(fields), CPU)
    assert (arrived is None) == (comm.rank == ranks[0])
    return fields if arrived is None else CODEC.unpack(arrived.parts, CPU)


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
    return same(fields, bring(lane, ranks, fields))


def copy_in_many_ways(comm: GroupFreeComm) -> list[bool]:
    groups = [(0, 1), (2, 0), (1, 2, 0), (0, 2, 1), (2, 1)]
    return [copy_between(comm, ranks) for ranks in groups]


@both_transports
def test_every_kind_of_field_arrives_bit_identical(heap_class: type[SharedMemoryHeap]) -> None:
    assert run_ranks(heap_class, 3, copy_in_many_ways) == [[True] * 5] * 3


def count_messages(comm: GroupFreeComm, fields: dict[str, Any]) -> int:
    """How many broadcasts it takes to copy ``fields``."""
    with patch.object(comm, "broadcast", wraps=comm.broadcast) as broadcast:
        received = bring(comm, (0, 1), fields)
        assert same(received, fields)
        tensors = [tensor for tensor in received.values() if isinstance(tensor, torch.Tensor)]
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors), "keeps a message"
    return broadcast.call_count


def messages_by_size(comm: GroupFreeComm) -> list[int]:
    small = {f"{i}": torch.full((i, 3), i, dtype=torch.bfloat16) for i in range(20)}
    large = {f"large {i}": torch.arange(SMALL_BYTES + i) for i in range(2)}
    metadata = {"text": "x" * METADATA_ROOM}
    return [
        count_messages(comm, fields) for fields in ({}, small, {**small, **metadata}, {**large, **small}, large)
    ]


@both_transports
def test_a_small_artifact_takes_one_message(heap_class: type[SharedMemoryHeap]) -> None:
    assert run_ranks(heap_class, 2, messages_by_size) == [[1, 1, 2, 3, 3]] * 2


def sender_stops_halfway(comm: GroupFreeComm) -> None:
    """The receiver must not take for an artifact what it has until then."""
    fields = {"large": torch.ones(SMALL_BYTES), "text": "x" * 2 * METADATA_ROOM}
    if comm.rank == 0:
        sent = comm.broadcast
        messages = iter(range(3))

        def stop_after_two(*args: Any) -> None:
            if next(messages) == 2:
                raise InterruptedError
            sent(*args)

        with patch.object(comm, "broadcast", stop_after_two), pytest.raises(InterruptedError):
            bring(comm, (0, 1), fields)
        return
    with pytest.raises(CommTimeout):
        bring(comm, (0, 1), fields)


@both_transports
def test_a_sender_that_stops_halfway_is_a_timeout(heap_class: type[SharedMemoryHeap]) -> None:
    assert run_ranks(heap_class, 2, sender_stops_halfway, comm_timeout_s=2.0) == [None] * 2


def fail_then_send(comm: GroupFreeComm) -> list[str]:
    """Rank 1 gets its copy from rank 0, which at first has reasons not to send it; rank 3 its own from rank 2."""
    lane = comm.lane("migration")
    fields = {"x": torch.arange(3), "large": torch.ones(SMALL_BYTES)}
    command = command_to(CODEC.view(fields), (0, 2), (1, 3))
    assert [transfer.ranks for transfer in command.transfers] == [(0, 1), (2, 3)]
    other = {"x": torch.arange(4), "large": fields["large"]}

    def unpickled() -> ArtifactParts:
        raise TypeError("latents cannot be pickled" + "x" * 2 * METADATA_ROOM)

    said = []
    for export in (unpickled, lambda: CODEC.pack(other), lambda: CODEC.pack({"x": fields["x"]})):
        mine = export if comm.rank == 0 else lambda: CODEC.pack(fields)
        if comm.rank < 2:
            with pytest.raises(MigrationError, match="rank 0 cannot send r/x") as failure:
                migrate(lane, command, mine, CPU)
            said.append(str(failure.value)[:60])
        else:
            assert (migrate(lane, command, mine, CPU) is None) == (comm.rank == 2)
    arrived = migrate(lane, command, lambda: CODEC.pack(fields), CPU)
    assert arrived is None or same(CODEC.unpack(arrived.parts, CPU), fields)
    return said


@both_transports
def test_a_sender_that_cannot_send_says_so_and_the_edge_stays_usable(heap_class: type[SharedMemoryHeap]) -> None:
    sent, received, *others = run_ranks(heap_class, 4, fail_then_send)
    assert sent == received and others == [[], []]
    assert "pickled" in sent[0] and "shape" in sent[1] and "fields" in sent[2]


def send_an_older_part(comm: GroupFreeComm) -> str:
    """Ranks 0 and 1 should have changed sides by a copy, which broke on rank 0; rank 2 wants all of it.

    Says what this rank is told.
    """
    lane = comm.lane("migration")
    codec = FieldCodec({"rows": Sharding("shape", sp_dim=0)})
    whole = torch.arange(6 * SMALL_BYTES).view(6, -1)
    before, after = ExecutionLayout((0, 1), ParallelSpec(2)), ExecutionLayout((1, 0), ParallelSpec(2))
    view, target = codec.view({"rows": whole, "shape": tuple(whole.shape)}), ExecutionLayout((2,))
    held = dict.fromkeys(after.ranks, after)
    plan = plan_transfers(view, held, target)
    command = Migrate(1, "r", "r/x", plan.ranks, plan.transfers, target, tuple(held.items()), view)

    def export(layout: ExecutionLayout) -> ArtifactParts:
        ((begin, end), _) = view.fields[0].box(layout, comm.rank)
        parts = codec.pack({"rows": whole[begin:end], "shape": tuple(whole.shape)})
        parts.layout = layout
        return parts

    said = ""
    try:
        migrate(lane, command, lambda: export(before if comm.rank == 0 else after), CPU)
    except MigrationError as error:
        assert error.missing, "it was lost with the copy that broke: the task may run again"
        said = str(error)
    arrived = migrate(lane, command, lambda: export(after), CPU)
    assert arrived is None or torch.equal(arrived.parts.tensors["rows"], whole)
    assert arrived is None or arrived.parts.layout == target
    return said


@both_transports
def test_a_part_of_the_same_shape_from_another_layout_is_not_sent(heap_class: type[SharedMemoryHeap]) -> None:
    sent, other, received = run_ranks(heap_class, 3, send_an_older_part)
    assert sent == received and "the part under sp2@0,1, not that under sp2@1,0" in sent
    assert other == ""


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
    return scheduler, torch.randn(1, 96, 96, generator=generator), generator


def hand_over(comm: GroupFreeComm, holder: int, rank: int, fields: dict[str, Any]) -> dict[str, Any]:
    """What a receiver cannot know, what the fields are, it is told, as by the control plane."""
    if comm.rank == holder:
        view = CODEC.view(fields)
        message = torch.frombuffer(bytearray(pickle.dumps(view).ljust(4096, b" ")), dtype=torch.uint8)
    else:
        message = torch.empty(4096, dtype=torch.uint8)
    comm.broadcast(message, holder, comm.group((holder, rank)))
    view = pickle.loads(message.numpy().tobytes())
    arrived = migrate(comm, command_to(view, (holder,), (rank,)), lambda: CODEC.pack(fields), CPU)
    return {} if arrived is None else CODEC.unpack(arrived.parts, CPU)


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
            fields = hand_over(lane, holder, rank, fields)
            holder = rank
        if comm.rank == rank:
            fields["latents"] = walk(fields["scheduler"], fields["latents"], fields["generator"], steps)
    return fields.get("latents")


def test_solver_history_and_generator_migrate_so_that_a_trajectory_is_bit_identical() -> None:
    scheduler, latents, generator = start()
    alone = walk(scheduler, latents, generator, range(12))
    assert len(scheduler.model_outputs) == 3, "the solver keeps history, or this test proves nothing"
    assert latents.nbytes > NESTED_BYTES and len(tensor_fields({"scheduler": scheduler})) > 2, "it is a field"
    moved = run_ranks(SharedMemoryHeap, 2, relay)[0]
    assert torch.equal(moved, alone)
    fresh, latents, generator = start()
    half = walk(fresh, latents, generator, range(5))
    forgetful, *_ = start()  # negative control: the same latents and generator without the solver's history
    forgetful._step_index = fresh._step_index
    assert not torch.equal(walk(forgetful, half, generator, range(5, 12)), alone)


class Derived:
    """Pickled as what it was made of; it makes the rest of that again."""

    def __init__(self, made_of: torch.Tensor) -> None:
        self.made_of = made_of
        self.square = made_of * made_of


def test_what_an_object_can_make_again_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = {"nested": [Derived(torch.randn(64, NESTED_BYTES // 64))]}
    assert len(CODEC.view(artifact).fields) == 2, "both are large, and nobody said how it is pickled"
    monkeypatch.setitem(copyreg.dispatch_table, Derived, lambda value: (Derived, (value.made_of,)))
    parts = CODEC.pack(artifact)
    assert [field.name for field in CODEC.view(artifact).fields] == list(parts.tensors) == ["nested.0.0"]
    assert len(parts.metadata) < NESTED_BYTES
    (arrived,) = CODEC.unpack(parts, CPU)["nested"]
    assert torch.equal(arrived.made_of, artifact["nested"][0].made_of)
    assert torch.equal(arrived.square, artifact["nested"][0].square)
