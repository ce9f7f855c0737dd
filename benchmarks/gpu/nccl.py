"""NCCL beside our collectives, where there is a GPU per rank. Never run on several GPUs.

Groups of NCCL are made and used once before its steady times are taken. What that costs is measured, too: a new
group and its first collective, with a communicator of its own and split off the world's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gfdit.comm import GroupFreeComm
from gfdit.comm.measure import captured

_REPEATS = 50


def nccl_rank(comm: GroupFreeComm, directory: str, sizes: Sequence[int], rounds: int) -> list[Any]:
    """Rows like those of ``timings``: labels with seconds by round."""
    store = dist.FileStore(str(Path(directory, "nccl")), comm.world_size)
    options: dict[str, Any] = {"store": store, "rank": comm.rank, "world_size": comm.world_size}
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=comm.device, **options)
    try:
        ranks = list(range(comm.world_size))
        rows = [
            _row(
                "nccl new_group and first collective", comm, 0, [_first_use(comm, lambda: dist.new_group(ranks))]
            ),
            _row(
                "nccl split and first collective",
                comm,
                0,
                [_first_use(comm, lambda: dist.split_group(None, [ranks]))],
            ),
        ]
        with torch.cuda.stream(torch.cuda.Stream(comm.device)):
            for num_bytes in sizes:
                for name, call in _calls(comm, num_bytes).items():
                    rows.append(_row(f"nccl {name}", comm, num_bytes, _steady(comm, call, rounds)))
        return rows
    finally:
        dist.destroy_process_group()


def _row(
    what: str, comm: GroupFreeComm, num_bytes: int, seconds: list[float]
) -> tuple[dict[str, Any], list[float]]:
    return {"what": what, "ranks": comm.world_size, "bytes": num_bytes}, seconds


def _first_use(comm: GroupFreeComm, make: Callable[[], Any]) -> float:
    dist.barrier()
    torch.cuda.synchronize(comm.device)
    begin = time.perf_counter()
    group = make()
    x = torch.zeros(1024, dtype=torch.uint8, device=comm.device)
    dist.all_gather_into_tensor(x.new_empty(1024 * comm.world_size), x, group=group)
    torch.cuda.synchronize(comm.device)
    return time.perf_counter() - begin


def _calls(comm: GroupFreeComm, num_bytes: int) -> dict[str, Callable[[], object]]:
    """On the world's communicator; ``num_bytes`` per pair of ranks, as in our rows."""
    x, whole, out = (
        torch.zeros(parts * num_bytes, dtype=torch.uint8, device=comm.device)
        for parts in (1, comm.world_size, comm.world_size)
    )
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(out, x),
        "all_to_all": lambda: dist.all_to_all_single(out, whole),
        "broadcast": lambda: dist.broadcast(x, 0),
    }


def _steady(comm: GroupFreeComm, call: Callable[[], object], rounds: int) -> list[float]:
    for _ in range(3):
        call()
    comm.synchronize()
    graph = captured(lambda: (call(), None)[1], _REPEATS)
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        comm.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / _REPEATS)
    return times
