"""Peers that are late, confused or stopped: errors in time that name the edge, and a device that goes on."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.operations import Operations
from benchmarks.gpu.ranks import meet, outcome
from gfdit.comm import CommAborted, CommError, CommMismatch, CommTimeout, GroupFreeComm

# Ranks 0 and 1 get into trouble, 2 and 3 have nothing to do with it.
TROUBLED, OTHERS = (0, 1), (2, 3)


def timeout(comm: GroupFreeComm, directory: str, timeout_s: float, late_s: float) -> str:
    """Rank 1 never comes; it is over within ``late_s`` of the timeout. Runs on four ranks."""
    told = ""
    if comm.rank == 0:
        group = comm.group(TROUBLED)
        error, elapsed_s = outcome(comm, lambda: comm.barrier(group))
        _expect(error, CommTimeout, comm, peer=1)
        if not timeout_s <= elapsed_s <= timeout_s + late_s:
            raise AssertionError(f"timed out after {elapsed_s:.3f} s, the timeout is {timeout_s} s")
        told = f"after {elapsed_s - timeout_s:+.3f} s"
        refused, _ = outcome(comm, lambda: comm.barrier(group))
        _expect(refused, CommAborted, comm, peer=1)
    elif comm.rank in OTHERS:
        _go_on(comm)
    return _recover(comm, directory, "timeout") or told


def mismatch(comm: GroupFreeComm, directory: str) -> str:
    """Ranks 0 and 1 gather parts of different sizes: nobody gets wrong bytes."""
    if comm.rank in TROUBLED:
        group = comm.group(TROUBLED)
        x = torch.zeros(64 * (1 + comm.rank), dtype=torch.uint8, device=comm.device)
        out = torch.zeros(2 * x.nbytes, dtype=torch.uint8, device=comm.device)
        error, _ = outcome(comm, lambda: comm.all_gather_into_tensor(out, x, group))
        _expect(error, CommMismatch, comm, peer=1 - comm.rank)
    elif comm.rank in OTHERS:
        _go_on(comm)
    return _recover(comm, directory, "mismatch")


def abort(comm: GroupFreeComm, directory: str, late_s: float) -> str:
    """Rank 1 aborts what rank 0 waits for, from outside; it is over within ``late_s``."""
    told = ""
    if comm.rank == 0:
        error, elapsed_s = outcome(comm, lambda: comm.barrier(comm.group(TROUBLED)))
        _expect(error, CommAborted, comm, peer=1)
        told = f"after {elapsed_s:.3f} s, aborted after 0.2 s"
        if elapsed_s > 0.2 + late_s:
            raise AssertionError(told)
    elif comm.rank == 1:
        time.sleep(0.2)
        comm.abort([0])
    elif comm.rank in OTHERS:
        _go_on(comm)
    return _recover(comm, directory, "abort") or told


def repeated(comm: GroupFreeComm, directory: str, times: int) -> str:
    """Trouble and recovery, again and again, on the same edges."""
    for number in range(times):
        if comm.rank == 0:
            error, _ = outcome(comm, lambda: comm.barrier(comm.group(TROUBLED)))
            _expect(error, CommAborted, comm, peer=1)
        elif comm.rank == 1:
            comm.abort([0])
        _recover(comm, directory, f"repeated-{number}")
    return f"{times} times"


def _expect(error: CommError | None, kind: type[CommError], comm: GroupFreeComm, peer: int) -> None:
    if not isinstance(error, kind):
        raise AssertionError(f"rank {comm.rank}: {kind.__name__} was expected, got {error!r}")
    if (error.rank, error.edge, error.lane) != (comm.rank, (peer, comm.rank), "compute"):
        raise AssertionError(f"the error names another edge: {error}")


def _go_on(comm: GroupFreeComm) -> None:
    operations = Operations(comm)
    for key in range(10):
        operations.all_gather(comm.group(OTHERS), 3000, key)


def _recover(comm: GroupFreeComm, directory: str, name: str) -> str:
    """Quiesce, reset, resume; then everything works between all ranks, and the device computes."""
    meet(comm, directory, f"{name}-quiet")
    if comm.rank in TROUBLED:
        comm.reset([1 - comm.rank])
    meet(comm, directory, f"{name}-reset")
    operations = Operations(comm)
    everybody = comm.group(range(comm.world_size))
    for key, num_bytes in enumerate((1, 700, 100_000 if comm.device.type == "cuda" else 9000)):
        operations.all_gather(everybody, num_bytes, key)
    comm.synchronize()
    x = torch.arange(1000, device=comm.device)
    if int(x.sum()) != 499_500:
        raise AssertionError("the device does not compute any more")
    return ""
