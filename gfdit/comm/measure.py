"""How long collectives take: for the table the selector goes by, and for benchmarks.

Every rank runs the same cases in the same order. On a GPU the calls are captured in a graph and replayed, so that
what is measured is the device's time and not Python's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from gfdit.comm.choice import Choice, Situation
from gfdit.comm.group import Group
from gfdit.comm.group_free_comm import GroupFreeComm
from gfdit.comm.heap import Operation
from gfdit.comm.local_heap import LocalHeap

OPERATIONS = (
    Operation.BARRIER,
    Operation.ALL_GATHER,
    Operation.ALL_TO_ALL,
    Operation.BROADCAST,
    Operation.SEND,
    Operation.SCATTER_HEADS,
    Operation.GATHER_HEADS,
)
# Heads of bfloat16, one to each rank: query, key and value before attention, its output after it.
_HEAD_SIZE = 128
_HEAD_TENSORS = {Operation.SCATTER_HEADS: 3, Operation.GATHER_HEADS: 1}
# Repetitions of one measurement: as many as fit in this many bytes per pair, within limits.
_VOLUME_BYTES, _MIN_REPEATS, _MAX_REPEATS = 256 << 20, 5, 200
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Case:
    """An operation of the first ``group_size`` ranks. ``num_bytes`` per pair; ``choice`` None: the selector's.

    ``place_bytes``: of the heap.
    """

    operation: Operation
    group_size: int
    num_bytes: int
    choice: Choice | None = None
    place_bytes: int = 0

    @property
    def situation(self) -> Situation:
        num_tensors = _HEAD_TENSORS.get(self.operation, 0)
        into_place = num_tensors > 0 and self.num_bytes * self.group_size + 256 * num_tensors <= self.place_bytes
        return Situation(self.operation, self.group_size, self.num_bytes, target_in_heap=into_place)

    @property
    def num_tokens(self) -> int:
        """Of each rank, if heads are exchanged: about as many bytes for each pair."""
        return max(self.num_bytes // (2 * _HEAD_SIZE * _HEAD_TENSORS[self.operation]), 1)

    @property
    def repeats(self) -> int:
        return max(_MIN_REPEATS, min(_MAX_REPEATS, _VOLUME_BYTES // max(self.num_bytes, 1)))


def measure(
    comm: GroupFreeComm, cases: Sequence[Case], rounds: int, max_repeats: int = _MAX_REPEATS
) -> list[list[float]]:
    """Seconds of one operation as this rank sees it, by case and round; empty for cases it is not part of.

    Raises CommError as operations do.
    """
    # Virtual ranks share a device: none prepares anything on it while another one waits in a kernel.
    meet = comm.heap.meet if isinstance(comm.heap, LocalHeap) else lambda: None
    seconds: list[list[float]] = []
    with _stream_for_graphs(comm.device):
        for case in cases:
            group = comm.group(range(case.group_size)) if comm.rank < case.group_size else None
            with comm.selector.forced(case.choice) if comm.selector else nullcontext():
                run = _prepared(comm, group, case, min(case.repeats, max_repeats), meet)
                seconds.append([run() for _ in range(rounds)] if group else [])
            meet()
    return seconds


def make_call(comm: GroupFreeComm, group: Group, case: Case) -> Callable[[], None]:
    """The operation on tensors of its own, as member of ``group``."""
    size, num_bytes = len(group), case.num_bytes

    def memory(parts: int) -> torch.Tensor:
        return torch.zeros(parts * num_bytes, dtype=torch.uint8, device=comm.device)

    match case.operation:
        case Operation.BARRIER:
            return lambda: comm.barrier(group)
        case Operation.ALL_GATHER:
            x, out = memory(1), memory(size)
            return lambda: comm.all_gather_into_tensor(out, x, group)
        case Operation.ALL_TO_ALL:
            x, out = memory(size), memory(size)
            return lambda: comm.all_to_all_single(out, x, group)
        case Operation.BROADCAST:
            x = memory(1)
            return lambda: comm.broadcast(x, group.ranks[0], group)
        case Operation.SEND:
            x = memory(1)
            if comm.rank == group.ranks[0]:
                return lambda: comm.send(x, group.ranks[1])
            return lambda: comm.recv(x, group.ranks[0])
        case Operation.SCATTER_HEADS:
            shape = (1, case.num_tokens, size, _HEAD_SIZE)
            qkv = [torch.zeros(shape, dtype=torch.bfloat16, device=comm.device) for _ in range(3)]
            return lambda: _use(comm.scatter_heads(qkv, group))
        case Operation.GATHER_HEADS:
            shape = (1, case.num_tokens * size, 1, _HEAD_SIZE)
            attended = torch.zeros(shape, dtype=torch.bfloat16, device=comm.device)
            return lambda: _use(comm.gather_heads(attended, group))
        case _:
            raise ValueError(f"{case.operation.name.lower()} is not measured by itself")


def _use(outputs: object) -> None:
    """They are gone when the call returns, as after a layer."""


def captured(call: Callable[[], None], count: int) -> torch.cuda.CUDAGraph:
    """``count`` calls as one graph. The current stream must not be the default one. Never run on a GPU."""
    graph = torch.cuda.CUDAGraph()
    # Thread-local: virtual ranks capture in threads, and what one may not do while capturing, another may.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(count):
            call()
    finally:
        graph.capture_end()
    return graph


def _prepared(
    comm: GroupFreeComm, group: Group | None, case: Case, repeats: int, meet: Callable[[], object]
) -> Callable[[], float]:
    """A run that returns seconds per call, warmed up; nothing where this rank is not in the group."""
    call = make_call(comm, group, case) if group else lambda: None
    meet()  # whoever allocates memory is done
    for _ in range(_WARM_UP):
        call()
    comm.synchronize()
    meet()
    if comm.device.type != "cuda":
        return lambda: _time_on_host(comm, group, call, repeats)
    graph = captured(call, repeats) if group else torch.cuda.CUDAGraph()
    meet()
    return lambda: _time_on_device(comm, group, graph, repeats)


def _time_on_host(comm: GroupFreeComm, group: Group | None, call: Callable[[], None], repeats: int) -> float:
    assert group is not None
    comm.barrier(group)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def _time_on_device(comm: GroupFreeComm, group: Group | None, graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    assert group is not None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    comm.barrier(group)
    begin.record()
    graph.replay()
    end.record()
    comm.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


@contextmanager
def _stream_for_graphs(device: torch.device) -> Iterator[None]:
    """Makes a stream current on which a graph can be captured."""
    if device.type != "cuda" or torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
