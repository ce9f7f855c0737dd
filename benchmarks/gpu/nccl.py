"""NCCL beside our collectives, where there is a GPU per rank. Never run on several GPUs.

Groups of NCCL are made and used once before its steady times are taken. What that costs is measured, too: a new
group and its first collective, with a communicator of its own and split off the world's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.job import Job
from benchmarks.gpu.ranks import Where
from benchmarks.gpu.timings import Labelled, rows_of
from gfdit.comm import GroupFreeComm
from gfdit.comm.measure import captured

_REPEATS = 50


def run(job: Job) -> None:
    where = Where.of(job)
    for name, fn in (("plain", plain_rank), ("on symmetric memory", symmetric_rank)):
        job.check(name, partial(_check, job, where, fn))


def _check(job: Job, where: Where, fn: Callable[..., Labelled]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        rows = rows_of(where.run(fn, directory, job.spec.sizes, job.spec.rounds))
    for row in rows:
        job.row(**row)
    return f"{len(rows)} cases"


def plain_rank(comm: GroupFreeComm, directory: str, sizes: Sequence[int], rounds: int) -> Labelled:
    """Rows like those of ``timings``: labels with seconds by round."""
    with _world(comm, directory):
        ranks = list(range(comm.world_size))
        rows = [
            _row("nccl new_group, first use", comm, 0, [_first_use(comm, lambda: dist.new_group(ranks))]),
            _row("nccl split, first use", comm, 0, [_first_use(comm, lambda: dist.split_group(None, [ranks]))]),
        ]
        for num_bytes in sizes:
            memory = partial(torch.zeros, dtype=torch.uint8, device=comm.device)
            for name, call in _calls(comm, num_bytes, memory).items():
                rows.append(_row(f"nccl {name}", comm, num_bytes, _steady(comm, call, rounds)))
        return rows


def symmetric_rank(comm: GroupFreeComm, directory: str, sizes: Sequence[int], rounds: int) -> Labelled:
    """On memory that NCCL has registered with all ranks, for which it has kernels of its own (torch 2.9 on)."""
    with _world(comm, directory) as backend:
        pool = torch.cuda.MemPool(backend.mem_allocator)
        rows = []

        def memory(num_bytes: int) -> torch.Tensor:
            with torch.cuda.use_mem_pool(pool):
                return torch.empty(num_bytes, dtype=torch.uint8, device=comm.device)

        calls = [(num_bytes, _calls(comm, num_bytes, memory)) for num_bytes in sizes]
        backend.register_mem_pool(pool, symm=True)
        for num_bytes, by_name in calls:
            for name, call in by_name.items():
                rows.append(_row(f"nccl symmetric {name}", comm, num_bytes, _steady(comm, call, rounds)))
        return rows


@contextmanager
def _world(comm: GroupFreeComm, directory: str) -> Iterator[Any]:
    """NCCL's backend for all ranks, which has been used once."""
    store = dist.FileStore(str(Path(directory, "nccl")), comm.world_size)
    options: dict[str, Any] = {"store": store, "rank": comm.rank, "world_size": comm.world_size}
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=comm.device, **options)
    try:
        dist.barrier()
        yield dist.group.WORLD._get_backend(comm.device)  # type: ignore[union-attr]
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


def _calls(
    comm: GroupFreeComm, num_bytes: int, memory: Callable[[int], torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """On the world's communicator; ``num_bytes`` per pair of ranks, as in our rows."""
    x, whole, out = (memory(parts * num_bytes) for parts in (1, comm.world_size, comm.world_size))
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(out, x),
        "all_to_all": lambda: dist.all_to_all_single(out, whole),
        "broadcast": lambda: dist.broadcast(x, 0),
    }


def _steady(comm: GroupFreeComm, call: Callable[[], object], rounds: int) -> list[float]:
    for _ in range(3):
        call()
    torch.cuda.synchronize(comm.device)
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
