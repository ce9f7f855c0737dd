"""`gfdit bench migration`: artifacts from layout to layout between CPU ranks, against gloo's point-to-point.

Both move the same bytes between the same ranks, in one run and alternating order. Ours is the whole of a
migration: pickled metadata, new tensors, everything put together. Gloo's is the bare tensors into memory that is
there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.transfers import plan_transfers
from gfdit.observe.provenance import provenance, write_report

if TYPE_CHECKING:
    import torch

    from gfdit.comm import GroupFreeComm
    from gfdit.migration.codec import Artifact, FieldCodec

OURS, GLOO = "gfdit", "gloo"
NUM_RANKS = 4
TARGET_RATIO = 1.0
VOLUME_BYTES, MIN_REPEATS, MAX_REPEATS, WARM_UP = 96 << 20, 3, 100, 2


@dataclass(frozen=True, slots=True)
class Size:
    """Latents of ``shape`` (batch, tokens, channels), which are split over tokens where they are split."""

    name: str
    shape: tuple[int, int, int]
    dtype: str
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        batch, tokens, channels = self.shape
        return batch * tokens * channels * self.item_bytes


@dataclass(frozen=True, slots=True)
class Move:
    """From the layout ``before`` to ``after``; ``sharded``: latents are split between steps, else replicated."""

    name: str
    before: ExecutionLayout
    after: ExecutionLayout
    sharded: bool


SIZES = (
    Size("Qwen-Image 1024x1024", (1, 4096, 64), "bfloat16", 2),
    Size("Wan2.2, 30 MB", (1, 117_188, 64), "float32", 4),
)


def _on(*ranks: int) -> ExecutionLayout:
    return ExecutionLayout(ranks, ParallelSpec(len(ranks)))


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


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="each measures everything once")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write dated JSON and Markdown there")


def run(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    from gfdit.comm import spawn

    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    load_average = os.getloadavg()[0]
    cases = [Case(size, move) for size in SIZES for move in MOVES]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    by_rank = spawn(measure, NUM_RANKS, args=(store.port, cases, args.rounds), timeout_s=3600)
    entries = [_entry(case, by_rank, index) for index, case in enumerate(cases)]
    report = {**source, "load_average_before": load_average, "rounds": args.rounds, "migrations": entries}
    print("\n".join(_lines(entries)))
    if args.out is not None:
        for path in write_report(args.out, "migration", report, _markdown(report)):
            print(path)
    return 0


# In every rank


def measure(
    comm: GroupFreeComm, store_port: int, cases: Sequence[Case], rounds: int
) -> list[dict[str, list[float]]]:
    """Seconds of one migration by case, library and round, as this rank sees it."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    try:
        seconds: list[dict[str, list[float]]] = [{OURS: [], GLOO: []} for _ in cases]
        for number in range(rounds):
            for index, case in enumerate(cases):
                calls = _calls(comm, case)
                for name in (OURS, GLOO) if (number + index) % 2 else (GLOO, OURS):
                    seconds[index][name].append(_time(calls[name], case.repeats))
        return seconds
    finally:
        dist.destroy_process_group()


def _time(call: Callable[[], object], repeats: int) -> float:
    import torch.distributed as dist

    for _ in range(WARM_UP):
        call()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def _calls(comm: GroupFreeComm, case: Case) -> dict[str, Callable[[], object]]:
    """The migration in both libraries; both have brought every rank what it needs."""
    import torch

    from gfdit.migration.codec import FieldCodec, Sharding
    from gfdit.migration.transfer import migrate

    size, move = case.size, case.move
    codec = FieldCodec({"latents": Sharding("shape", sp_dim=1)} if move.sharded else None)
    whole = torch.arange(size.num_bytes // size.item_bytes).to(getattr(torch, size.dtype)).view(size.shape)
    command = _command(codec, whole, move)
    before = _artifact(command, whole, move.before, comm.rank)
    lane = comm.lane("migration")

    def ours() -> object:
        if comm.rank in command.ranks:
            arrived = migrate(lane, command, lambda: codec.pack(before), comm.device)
            return None if arrived is None else codec.unpack(arrived.parts, comm.device)["latents"]
        return None

    theirs = _gloo(comm.rank, command, whole, move)
    expected = _artifact(command, whole, move.after, comm.rank).get("latents")
    for name, call in ((OURS, ours), (GLOO, theirs)):
        brought = call()
        if comm.rank in command.ranks and expected is not None and not torch.equal(brought, expected):  # type: ignore[arg-type]
            raise RuntimeError(f"rank {comm.rank}: {name} brought something else ({move.name})")
    return {OURS: ours, GLOO: theirs}


def _command(codec: FieldCodec, whole: torch.Tensor, move: Move) -> Migrate:
    view = codec.view({"latents": whole, "shape": tuple(whole.shape), "step_index": 7})
    held = dict.fromkeys(move.before.ranks, move.before)
    plan = plan_transfers(view, held, move.after)
    holders = tuple((rank, held[rank]) for rank in plan.ranks if rank in held)
    return Migrate(1, "r", "r/latents/7", plan.ranks, plan.transfers, move.after, holders, view)


def _artifact(command: Migrate, whole: torch.Tensor, layout: ExecutionLayout, rank: int) -> Artifact:
    """What ``rank`` holds under ``layout``; nothing where it is not in it."""
    if rank not in layout.ranks:
        return {}
    box = command.view.fields[0].box(layout, rank)
    part = whole[tuple(slice(*part) for part in box)].clone()
    return {"latents": part, "shape": tuple(whole.shape), "step_index": 7}


def _gloo(rank: int, command: Migrate, whole: torch.Tensor, move: Move) -> Callable[[], object]:
    """All transfers at once, each piece to each receiver, from and to the memory where it is needed."""
    import torch
    import torch.distributed as dist

    field = command.view.fields[0]
    result = None
    if rank in move.after.ranks:
        needed = field.box(move.after, rank)
        result = torch.empty([end - begin for begin, end in needed], dtype=whole.dtype)
        result.copy_(whole[tuple(slice(*part) for part in needed)])
    works: list[tuple[Callable[..., Any], torch.Tensor, int]] = []
    for transfer in command.transfers:
        for piece in transfer.pieces:
            if rank == transfer.source:
                data = whole[tuple(slice(*part) for part in piece.box)].contiguous()
                works += [(dist.isend, data, destination) for destination in transfer.destinations]
            elif rank in transfer.destinations:
                assert result is not None
                region = result[
                    tuple(slice(p[0] - n[0], p[1] - n[0]) for p, n in zip(piece.box, needed, strict=True))
                ]
                region.zero_()
                works.append((dist.irecv, region, transfer.source))

    def call() -> object:
        for work in [start(tensor, peer) for start, tensor, peer in works]:
            work.wait()
        return result

    return call


# The report


def _entry(case: Case, by_rank: Sequence[list[dict[str, list[float]]]], index: int) -> dict[str, Any]:
    """A round takes as long as its slowest rank; ``ratio`` is gloo's time over ours, round by round."""
    seconds = {
        name: [max(values) for values in zip(*(rank[index][name] for rank in by_rank), strict=True)]
        for name in (OURS, GLOO)
    }
    ratios = [gloo / ours for ours, gloo in zip(seconds[OURS], seconds[GLOO], strict=True)]
    return {
        "artifact": case.size.name,
        "bytes": case.size.num_bytes,
        "migration": case.move.name,
        f"{OURS}_ms": _spread([1e3 * value for value in seconds[OURS]]),
        f"{GLOO}_ms": _spread([1e3 * value for value in seconds[GLOO]]),
        "ratio": _spread(ratios),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _cells(entry: dict[str, Any]) -> list[str]:
    times = [
        f"{v['median']:.2f} ({v['min']:.2f} to {v['max']:.2f})" for v in (entry["gfdit_ms"], entry["gloo_ms"])
    ]
    ratio = entry["ratio"]
    return [
        entry["artifact"],
        entry["migration"],
        *times,
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
    ]


_TITLES = ["latents", "migration", "gfdit (ms)", "gloo (ms)", "gloo / gfdit"]


def _lines(entries: Sequence[dict[str, Any]]) -> list[str]:
    rows = [_TITLES, *map(_cells, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown(report: dict[str, Any]) -> str:
    entries = report["migrations"]
    worst = min(entries, key=lambda entry: entry["ratio"]["median"])
    reached = "reached" if worst["ratio"]["median"] >= TARGET_RATIO else "missed"
    rows = [_TITLES, ["---"] * len(_TITLES), *map(_cells, entries)]
    lines = [
        "# Migration of artifacts between CPU ranks against gloo point-to-point",
        "",
        f"- Gloo takes at least {worst['ratio']['median']:.2f} x our time ({worst['artifact']}, "
        f"{worst['migration']}; target {TARGET_RATIO:.0f} x: {reached})",
        f"- Date: {report['date']}, commit {report['commit']}",
        f"- Command: `{report['command']}`",
        f"- Machine: {report['machine']}; Python {report['python']}; "
        f"load average {report['load_average_before']:.1f}",
        f"- Median of {report['rounds']} rounds (smallest to largest), both libraries in each, the slowest of "
        f"{NUM_RANKS} ranks, one torch thread each",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "Both move the same bytes between the same ranks. Ours is a whole migration: metadata pickled and "
        "unpickled, new tensors made and filled. Gloo's is the bare tensors, all sends and receives at once, "
        "into memory that is there. Migrations follow each other without waiting for the slowest rank, in both; "
        "nothing here foretells anything about GPUs.",
    ]
    return "\n".join(lines) + "\n"
