"""Collectives in captured graphs: replayed as often as one likes, between others, they still agree.

The counters are on the device and tokens are made from them there, so a replay publishes the next instance of
every edge. Where there are no graphs, plain calls take their place, so that everything else is checked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.operations import Operations
from benchmarks.gpu.ranks import random_bytes, same_bits, together
from gfdit.comm import GroupFreeComm
from gfdit.comm.measure import captured


def replays(comm: GroupFreeComm, num_bytes: int, times: int) -> str:
    """One graph of an all-gather and an all-to-all in overlapping groups, replayed among other operations."""
    everybody, some = comm.group(range(comm.world_size)), (comm.world_size - 1, 0)
    x = torch.zeros(num_bytes, dtype=torch.uint8, device=comm.device)
    gathered = torch.zeros(comm.world_size * num_bytes, dtype=torch.uint8, device=comm.device)
    swapped = torch.zeros(2 * num_bytes, dtype=torch.uint8, device=comm.device)

    def calls() -> None:
        comm.all_gather_into_tensor(gathered, x, everybody)
        if comm.rank in some:
            comm.all_to_all_single(swapped, gathered[: 2 * num_bytes], comm.group(some))
        comm.broadcast(x, 0, everybody)

    calls()  # before a capture, everything has run once
    comm.synchronize()
    together(comm)
    replay = _replayable(comm, calls)
    together(comm)
    operations = Operations(comm)
    for number in range(times):
        inputs = [random_bytes(comm.device, num_bytes, number, rank) for rank in everybody.ranks]
        x.copy_(inputs[comm.rank])
        replay()
        comm.synchronize()
        if not same_bits(gathered, torch.cat(inputs)) or not same_bits(x, inputs[0]):
            raise AssertionError(f"rank {comm.rank}: wrong bytes after replay {number}")
        if comm.rank in some:
            part = inputs[some.index(comm.rank)]
            if not same_bits(swapped, torch.cat((part, part))):
                raise AssertionError(f"rank {comm.rank}: wrong bytes in replayed all-to-all {number}")
        operations.all_gather(everybody, 100 + number, number)
    return f"{times} replays" if comm.device.type == "cuda" else f"{times} plain calls: no graphs on a CPU"


def _replayable(comm: GroupFreeComm, calls: Callable[[], None]) -> Callable[[], object]:
    if comm.device.type != "cuda":
        return calls
    return captured(calls, 1).replay
