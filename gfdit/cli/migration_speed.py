"""How long migrations between CPU ranks take, by this project's collectives and by gloo's point-to-point."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gfdit.comm import GroupFreeComm
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.artifacts.views import inside, intersection
from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.migration.codec import Artifact, FieldCodec, Sharding
from gfdit.migration.parts import ArtifactParts
from gfdit.migration.transfer import METADATA_ROOM, migrate
from gfdit.runtime.host_memory import keep_freed_memory

OURS, GLOO, BARE = LIBRARIES = ("gfdit", "gloo", "gloo, bare tensors")
NUM_RANKS = 4
# Repetitions of one measurement: as many as fit in this many bytes, within limits.
VOLUME_BYTES, MIN_REPEATS, MAX_REPEATS, WARM_UP = 192 << 20, 5, 200, 3


@dataclass(frozen=True, slots=True)
class Size:
    """Latents of ``shape`` (batch, tokens, channels), which are split over tokens where they are split."""

    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Move:
    """From the layout ``before`` to ``after``; ``sharded``: latents are split between steps, else replicated."""

    name: str
    before: ExecutionLayout
    after: ExecutionLayout
    sharded: bool


def _on(*ranks: int) -> ExecutionLayout:
    return ExecutionLayout(ranks, ParallelSpec(len(ranks)))


SIZES = (
    Size("Qwen-Image 1024x1024", (1, 4096, 64), torch.bfloat16),
    Size("Wan2.2, 30 MB", (1, 117_188, 64), torch.float32),
)
MOVES = (
    Move("moves from 1 rank to another", _on(0), _on(1), False),
    Move("grows from 1 rank to 4", _on(0), _on(0, 1, 2, 3), False),
    Move("grows from 2 ranks to 4", _on(0, 1), _on(0, 1, 2, 3), False),
    Move("split, grows from 2 ranks to 4", _on(0, 1), _on(0, 1, 2, 3), True),
    Move("split, shrinks from 4 ranks to 2", _on(0, 1, 2, 3), _on(0, 1), True),
)


@dataclass(frozen=True, slots=True)
class Case:
    size: Size
    move: Move

    @property
    def repeats(self) -> int:
        return max(MIN_REPEATS, min(MAX_REPEATS, VOLUME_BYTES // self.size.num_bytes))


CASES = tuple(Case(size, move) for size in SIZES for move in MOVES)


def measure(comm: GroupFreeComm, store_port: int, rounds: int) -> list[dict[str, list[float]]]:
    """Seconds of one migration by case, library and round, as this rank sees it. Runs in every rank."""
    keep_freed_memory()  # as workers do
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    try:
        seconds: list[dict[str, list[float]]] = [{name: [] for name in LIBRARIES} for _ in CASES]
        for number in range(rounds):
            for index, case in enumerate(CASES):
                calls = make_calls(comm, case)
                first = (number + index) % len(LIBRARIES)
                for name in LIBRARIES[first:] + LIBRARIES[:first]:
                    seconds[index][name].append(_time(calls[name], case.repeats))
        return seconds
    finally:
        dist.destroy_process_group()


def _time(call: Callable[[], object], repeats: int) -> float:
    for _ in range(WARM_UP):
        call()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def make_calls(comm: GroupFreeComm, case: Case) -> dict[str, Callable[[], torch.Tensor | None]]:
    """The migration in each way; all of them have brought every rank what it needs.

    Raises RuntimeError if one has not.
    """
    size, move = case.size, case.move
    codec = FieldCodec({"latents": Sharding("shape", sp_dim=1)} if move.sharded else None)
    whole = torch.arange(torch.Size(size.shape).numel()).to(size.dtype).view(size.shape)
    command = _command(codec, whole, move)
    before = _artifact(command, whole, move.before, comm.rank)
    calls: dict[str, Callable[[], torch.Tensor | None]] = {
        OURS: _Ours(comm.lane("migration"), command, before, move.before, codec),
        GLOO: _Gloo(comm.rank, command, move, before, codec),
        BARE: _Gloo(comm.rank, command, move, before, None),
    }
    expected = _artifact(command, whole, move.after, comm.rank)
    for name, call in calls.items():
        brought = call()
        if expected and brought is not None and not torch.equal(brought, expected["latents"]):
            raise RuntimeError(f"rank {comm.rank}: {name} brought something else ({move.name})")
    return calls


def _command(codec: FieldCodec, whole: torch.Tensor, move: Move) -> Migrate:
    view = codec.view(_fields(whole, whole))
    held = dict.fromkeys(move.before.ranks, move.before)
    plan = plan_transfers(view, held, move.after)
    holders = tuple((rank, held[rank]) for rank in plan.ranks if rank in held)
    return Migrate(1, "r", "r/latents/7", plan.ranks, plan.transfers, move.after, holders, view)


def _artifact(command: Migrate, whole: torch.Tensor, layout: ExecutionLayout, rank: int) -> Artifact:
    """What ``rank`` holds under ``layout``; nothing where it is not in it."""
    if rank not in layout.ranks:
        return {}
    field = command.view.fields[0]
    return _fields(whole[inside(field.whole, field.box(layout, rank))].clone(), whole)


def _fields(latents: torch.Tensor, whole: torch.Tensor) -> Artifact:
    return {"latents": latents, "shape": tuple(whole.shape), "step_index": 7}


@dataclass(frozen=True, slots=True)
class _Ours:
    """All that a worker does: metadata pickled and unpickled, new tensors made and put together."""

    comm: GroupFreeComm
    command: Migrate
    before: Artifact
    layout: ExecutionLayout
    codec: FieldCodec

    def __call__(self) -> torch.Tensor | None:
        if self.comm.rank not in self.command.ranks:
            return None
        arrived = migrate(self.comm, self.command, self._export, self.comm.device)
        return None if arrived is None else self.codec.unpack(arrived.parts, self.comm.device)["latents"]

    def _export(self) -> ArtifactParts:
        parts = self.codec.pack(self.before)
        parts.layout = self.layout
        return parts


class _Gloo:
    """The same transfers by ``isend`` and ``irecv``, all at once, from and to memory that is there.

    Without ``codec`` the tensors alone; with it whole artifacts: metadata is pickled, sent in a message of fixed
    size and unpickled, and what a rank has already goes into its new part.
    """

    def __init__(
        self, rank: int, command: Migrate, move: Move, before: Artifact, codec: FieldCodec | None
    ) -> None:
        field = command.view.fields[0]
        self._codec, self._before = codec, before
        self._sends: list[tuple[torch.Tensor, int]] = []
        self._receives: list[tuple[torch.Tensor, int]] = []
        self._message = torch.zeros(METADATA_ROOM, dtype=torch.uint8)
        self._told_by = self._tells = False
        self._latents: torch.Tensor | None = None
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None
        held = field.box(move.before, rank) if rank in move.before.ranks else None
        if rank in move.after.ranks:
            needed = field.box(move.after, rank)
            shape = [end - begin for begin, end in needed]
            latents = self._latents = torch.zeros(shape, dtype=getattr(torch, field.dtype))
            if held is not None and (common := intersection(held, needed)) is not None:
                self._own = latents[inside(needed, common)], before["latents"][inside(held, common)]
                self._own[0].copy_(self._own[1])
        for transfer in command.transfers:
            with_message = codec is not None and transfer.metadata
            if rank == transfer.source:
                assert held is not None
                parts = [before["latents"][inside(held, piece.box)].contiguous() for piece in transfer.pieces]
                parts += [self._message] if with_message else []
                self._sends += [(part, destination) for destination in transfer.destinations for part in parts]
                self._tells = self._tells or with_message
            elif rank in transfer.destinations:
                parts = [latents[inside(needed, piece.box)] for piece in transfer.pieces]
                parts += [self._message] if with_message else []
                self._receives += [(part, transfer.source) for part in parts]
                self._told_by = self._told_by or with_message

    def __call__(self) -> torch.Tensor | None:
        if self._codec is not None:
            if self._tells:
                data = self._codec.pack(self._before).metadata
                self._message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self._own is not None and self._receives:
                self._own[0].copy_(self._own[1])
        works = [dist.isend(tensor, peer) for tensor, peer in self._sends]
        works += [dist.irecv(tensor, peer) for tensor, peer in self._receives]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        if self._codec is not None and self._told_by and self._latents is not None:
            metadata = self._message.numpy().tobytes()
            self._codec.unpack(ArtifactParts(metadata, {"latents": self._latents}), torch.device("cpu"))
        return self._latents
