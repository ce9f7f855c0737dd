"""The heap between processes, two and four: on one GPU if there is one, by torch's symmetric memory.

What virtual ranks cannot show: the rendezvous, memory that one process has allocated and others have mapped, and
whether their kernels see each other's stores. Processes that share a GPU take turns on it, so nothing here is
fast; under MPS, NVIDIA's server that lets their kernels run at the same time, it is tried again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import operations
from benchmarks.gpu.job import Job
from benchmarks.gpu.ranks import Where
from gfdit.comm import GroupFreeComm, HeapDescriptor

COUNTS = (2, 4)
_MPS, _MPS_STARTS_S = "nvidia-cuda-mps-control", 10.0
# Of ranks that wait for their turn on the device for every word.
_COMM_TIMEOUT_S = 30.0
_SIZES = (37, 5000, 65_536 + 257)
_SMALL_SIZES = (37, 900)


def run(job: Job) -> None:
    if job.spec.interpret:
        _check_all(job, "interpreted", "")
        return
    shared = job.spec.heap == "local"
    if shared and "devices" not in {field.name for field in fields(HeapDescriptor)}:
        job.check("ranks that share a device", _no_device_map)
        return
    # What torch asks for before it lets ranks map memory of one device.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    _check_all(job, "torch_symmetric", "", shared=shared)
    if not shared:
        return
    if shutil.which(_MPS) is None:
        job.note(f"MPS was not tried: {_MPS} is not on the path")
        return
    try:
        with mps():
            _check_all(job, "torch_symmetric", " under MPS", shared=True)
    except RuntimeError as error:
        job.note(f"MPS was not tried: {error}")


def _no_device_map() -> str:
    raise NotImplementedError("this heap has rank r on device r: several cannot share one")


def _check_all(job: Job, heap: str, how: str, shared: bool = False) -> None:
    for count in COUNTS:
        job.check(f"{count} processes{how}", partial(_check, job, heap, count, how, shared))


def _check(job: Job, heap: str, count: int, how: str, shared: bool) -> str:
    where = Where(heap, count, 300.0 if job.spec.interpret else 90.0)
    more: dict[str, Any] = {"devices": (0,) * count} if shared else {}
    try:
        told = where.run(crossing, job.spec.quick, comm_timeout_s=_COMM_TIMEOUT_S, **more)
    except Exception as error:
        if "overlapping devices" in str(error):
            raise RuntimeError(f"torch refuses ranks that share a device: {_first_line(error)}") from error
        raise
    barrier_us = max(us for _, us in told)
    job.row(processes=f"{count}{how}", barrier_us=barrier_us)
    return f"{sum(count for count, _ in told)} results right, a barrier takes {barrier_us:.0f} us"


def crossing(comm: GroupFreeComm, quick: bool) -> tuple[int, float]:
    """How many results were right, and the microseconds of a barrier as the host sees it."""
    on_gpu = comm.device.type == "cuda"
    sizes = _SIZES if on_gpu else _SMALL_SIZES
    count = operations.ordered_subsets(comm, 2 if quick or not on_gpu else comm.world_size, sizes)
    count += operations.sums_and_heads(comm, (1, 1000) if on_gpu else (50,)) if not quick else 0
    count += operations.uneven_check(comm)
    group, times = comm.group(range(comm.world_size)), 50 if on_gpu else 2
    comm.barrier(group)
    comm.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        comm.barrier(group)
    comm.synchronize()
    return count, 1e6 * (time.perf_counter() - begin) / times


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """Processes started inside share devices under a server of our own, which ends with it.

    Changes no setting of a device. Raises RuntimeError, in one line, if the server cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="gfdit-mps-", ignore_cleanup_errors=True) as directory:
        ours = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        environment = os.environ | ours
        # In the foreground: it is in the process group of this part, and is ended with it.
        server = subprocess.Popen(
            [_MPS, "-f"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            _await_server(server, Path(directory))
            os.environ.update(ours)
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)
            if server.poll() is None:
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    subprocess.run([_MPS], input=b"quit\n", env=environment, capture_output=True, timeout=5)
                server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)


def _await_server(server: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + _MPS_STARTS_S
    while not (directory / "control").exists():
        if server.poll() is not None:
            assert server.stderr is not None
            said = " ".join(server.stderr.read().decode(errors="replace").split())
            raise RuntimeError(f"{_MPS} ended with {server.returncode}: {said}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{_MPS} does not answer after {_MPS_STARTS_S:.0f} s")
        time.sleep(0.05)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
