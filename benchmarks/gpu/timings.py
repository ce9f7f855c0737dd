"""How long everything takes: groups, handshake, barrier, and every path from 1 KiB to 64 MiB, by group size.

Figures of virtual ranks are of kernels that share one GPU and its memory; they say nothing about links between
GPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.handshake import Handshake
from benchmarks.gpu.job import Job
from benchmarks.gpu.ranks import Where, together
from gfdit.comm import GroupFreeComm
from gfdit.comm.heap import Operation
from gfdit.comm.measure import Case, captured, measure
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES

OPERATIONS = (Operation.BARRIER, Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.BROADCAST)
GROUPS_MADE = 1000

# Of one rank: what was timed, with seconds by round.
Labelled = list[tuple[dict[str, Any], list[float]]]


def run(job: Job) -> None:
    """A row per case, in microseconds: median, smallest and largest round of the slowest rank."""
    where, spec = Where.of(job), job.spec
    max_repeats, heap_sizes = (200, DEVICE_SIZES) if where.on_gpu else (1, None)

    def timed(fn: Callable[..., Labelled], *args: Any) -> str:
        rows = rows_of(where.run(fn, *args, spec.rounds, max_repeats, sizes=heap_sizes))
        for row in rows:
            job.row(**row)
        return f"{len(rows)} cases"

    job.check("handshake, groups and copies", lambda: timed(_time_floor, spec.sizes))
    for operation in OPERATIONS:
        sizes = spec.sizes if operation is not Operation.BARRIER else (0,)
        job.check(operation.name.lower(), partial(timed, _time_operation, operation, sizes, spec.ranks))


def rows_of(by_rank: Sequence[Labelled]) -> list[dict[str, Any]]:
    rows = []
    for entries in zip(*by_rank, strict=True):
        label, _ = entries[0]
        rows.append(label | slowest([times for _, times in entries]))
    return rows


def slowest(by_rank: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of seconds by rank and round: a round takes as long as its slowest rank. Ranks without any took no part."""
    microseconds = [1e6 * max(times) for times in zip(*(times for times in by_rank if times), strict=True)]
    median = statistics.median(microseconds)
    return {"us": median, "min_us": min(microseconds), "max_us": max(microseconds)}


def _time_operation(
    comm: GroupFreeComm,
    operation: Operation,
    sizes: Sequence[int],
    group_size: int,
    rounds: int,
    max_repeats: int,
) -> Labelled:
    cases = []
    for num_bytes in sizes:
        case = Case(operation, group_size, num_bytes)
        assert comm.selector is not None
        choices = [comm.selector.choose(case.situation)]
        if comm.device.type == "cuda":  # else times mean nothing
            choices += comm.selector.candidates(case.situation)
        cases += [Case(operation, group_size, num_bytes, choice) for choice in dict.fromkeys(choices)]
    times = measure(comm, cases, rounds, max_repeats)
    return list(zip([_label(case) for case in cases], times, strict=True))


def _time_floor(comm: GroupFreeComm, sizes: Sequence[int], rounds: int, max_repeats: int) -> Labelled:
    floor = [
        ({"what": "handshake", "ranks": comm.world_size, "bytes": 0}, _time_handshake(comm, rounds, max_repeats)),
        ({"what": "group", "ranks": comm.world_size, "bytes": 0}, _time_groups(comm, rounds)),
    ]
    for num_bytes in sizes:
        label = {"what": "device copy", "ranks": 1, "bytes": num_bytes}
        floor.append((label, _time_copy(comm, num_bytes, rounds, max_repeats)))
    return floor


def _label(case: Case) -> dict[str, Any]:
    name, choice = case.operation.name.lower(), case.choice
    assert choice is not None
    fields = {"path": str(choice.path), "chunk_bytes": choice.chunk_bytes, "programs": choice.num_programs}
    return {"what": name, "ranks": case.group_size, "bytes": case.num_bytes, **fields}


def _time_groups(comm: GroupFreeComm, rounds: int) -> list[float]:
    """Registration: what makes a logical group of ranks."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for number in range(GROUPS_MADE):
            comm.group(range(comm.world_size) if number % 2 else range(comm.world_size - 1, -1, -1))
        times.append((time.perf_counter() - begin) / GROUPS_MADE)
    return times


def _time_handshake(comm: GroupFreeComm, rounds: int, repeats: int) -> list[float]:
    together(comm)
    call = Handshake(comm)
    comm.synchronize()
    together(comm)
    times = time_calls(comm, call, rounds, repeats)
    call.check()
    return times


def _time_copy(comm: GroupFreeComm, num_bytes: int, rounds: int, repeats: int) -> list[float]:
    """Rank 0 alone, while the others are idle: what the device can do."""
    if comm.rank == 0:
        x, out = (torch.zeros(num_bytes, dtype=torch.uint8, device=comm.device) for _ in range(2))
        out.copy_(x)
        comm.synchronize()
    together(comm)
    times = []
    if comm.rank == 0:
        copies = min(repeats, 20)
        for _ in range(rounds):
            times.append(time_once(comm, lambda: repeat(lambda: out.copy_(x), copies)) / copies)
    together(comm)
    return times


def time_calls(comm: GroupFreeComm, call: Callable[[], object], rounds: int, repeats: int) -> list[float]:
    """Seconds per call, by round; on a GPU from a graph of all repeats, on a stream that is not the default."""
    call()
    comm.synchronize()
    together(comm)
    on_gpu = comm.device.type == "cuda"
    run = captured(lambda: (call(), None)[1], repeats).replay if on_gpu else lambda: repeat(call, repeats)
    together(comm)
    times = [time_once(comm, run) / repeats for _ in range(rounds)]
    together(comm)
    return times


def repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def time_once(comm: GroupFreeComm, run: Callable[[], object]) -> float:
    if comm.device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    run()
    end_event.record()
    comm.synchronize()
    return begin_event.elapsed_time(end_event) / 1000
