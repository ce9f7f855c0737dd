"""How long everything takes: groups, handshake, barrier, and every path from 1 KiB to 64 MiB, by group size.

Figures of virtual ranks are of kernels that share one GPU and its memory; they say nothing about links between
GPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.handshake import Handshake
from benchmarks.gpu.nccl import nccl_rank
from benchmarks.gpu.ranks import Where
from gfdit.comm import GroupFreeComm, LocalHeap
from gfdit.comm.heap import Operation
from gfdit.comm.measure import Case, captured, measure
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES

OPERATIONS = (Operation.BARRIER, Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.BROADCAST)
GROUPS_MADE = 1000


def timings(where: Where, sizes: Sequence[int], group_sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row per case, in microseconds: median, smallest and largest round of the slowest rank."""
    max_repeats, heap_sizes = (200, DEVICE_SIZES) if where.on_gpu else (1, None)
    return _rows(where.run(_time_rank, sizes, group_sizes, rounds, max_repeats, sizes=heap_sizes))


def nccl_timings(where: Where, directory: str, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """NCCL's, on the same GPUs."""
    return _rows(where.run(nccl_rank, directory, sizes, rounds))


def _rows(by_rank: Sequence[Sequence[tuple[dict[str, Any], list[float]]]]) -> list[dict[str, Any]]:
    rows = []
    for entries in zip(*by_rank, strict=True):
        label, _ = entries[0]
        slowest = [max(times) for times in zip(*(times for _, times in entries if times), strict=True)]
        microseconds = [1e6 * seconds for seconds in slowest]
        median = statistics.median(microseconds)
        rows.append(label | {"us": median, "min_us": min(microseconds), "max_us": max(microseconds)})
    return rows


def _time_rank(
    comm: GroupFreeComm, sizes: Sequence[int], group_sizes: Sequence[int], rounds: int, max_repeats: int
) -> list[tuple[dict[str, Any], list[float]]]:
    cases = []
    for group_size in group_sizes:
        for operation in OPERATIONS:
            for num_bytes in sizes if operation is not Operation.BARRIER else [0]:
                case = Case(operation, group_size, num_bytes)
                assert comm.selector is not None
                choices = [comm.selector.choose(case.situation)]
                if comm.device.type == "cuda":  # else times mean nothing
                    choices += comm.selector.candidates(case.situation)
                cases += [Case(operation, group_size, num_bytes, choice) for choice in dict.fromkeys(choices)]
    labels = [_label(case) for case in cases]
    times = measure(comm, cases, rounds, max_repeats)
    extra = [
        ({"what": "handshake", "ranks": comm.world_size, "bytes": 0}, _time_handshake(comm, rounds, max_repeats)),
        ({"what": "group", "ranks": comm.world_size, "bytes": 0}, _time_groups(comm, rounds)),
    ]
    for num_bytes in sizes:
        label = {"what": "device copy", "ranks": 1, "bytes": num_bytes}
        extra.append((label, _time_copy(comm, num_bytes, rounds, max_repeats)))
    return [*extra, *zip(labels, times, strict=True)]


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
    _meet(comm)
    call = Handshake(comm)
    comm.synchronize()
    _meet(comm)
    return _time_calls(comm, call, rounds, repeats)


def _time_copy(comm: GroupFreeComm, num_bytes: int, rounds: int, repeats: int) -> list[float]:
    """Rank 0 alone, while the others are idle: what the device can do."""
    if comm.rank == 0:
        x, out = (torch.zeros(num_bytes, dtype=torch.uint8, device=comm.device) for _ in range(2))
        out.copy_(x)
        comm.synchronize()
    _meet(comm)
    times = []
    if comm.rank == 0:
        copies = min(repeats, 20)
        for _ in range(rounds):
            times.append(_time_once(comm, lambda: repeat(lambda: out.copy_(x), copies)) / copies)
    _meet(comm)
    return times


def _time_calls(comm: GroupFreeComm, call: Callable[[], None], rounds: int, repeats: int) -> list[float]:
    """Seconds per call, by round; on a GPU from a graph of all repeats."""
    call()
    comm.synchronize()
    _meet(comm)
    run = captured(call, repeats).replay if comm.device.type == "cuda" else lambda: repeat(call, repeats)
    _meet(comm)
    times = [_time_once(comm, run) / repeats for _ in range(rounds)]
    _meet(comm)
    return times


def repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _time_once(comm: GroupFreeComm, run: Callable[[], object]) -> float:
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


def _meet(comm: GroupFreeComm) -> None:
    if isinstance(comm.heap, LocalHeap):
        comm.heap.meet()
