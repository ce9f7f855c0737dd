"""Where checks run: virtual ranks of one GPU, a GPU per rank, or interpreted kernels on a CPU."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.job import Job
from gfdit.comm import CommError, GroupFreeComm, LocalHeap, spawn

# Small, so that messages of a few hundred KiB take several rounds.
SMALL_SIZES = {
    "slot_bytes": 64 << 10,
    "low_latency_bytes": 4 << 10,
    "export_bytes": 64 << 10,
    "multicast_bytes": 8 << 10,
    "place_bytes": 1 << 20,
    "scratch_bytes": 16 << 20,
}
TINY_SIZES = {
    "slot_bytes": 4 << 10,
    "low_latency_bytes": 1 << 10,
    "export_bytes": 8 << 10,
    "multicast_bytes": 2 << 10,
    "place_bytes": 64 << 10,
    "scratch_bytes": 1 << 20,
}
_MEET_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Where:
    """``heap``: as of ``gfdit.comm.spawn``. ``timeout_s``: for all that is run at once."""

    heap: str
    num_ranks: int
    timeout_s: float = 120.0

    @classmethod
    def of(cls, job: Job) -> Where:
        return cls(job.spec.heap, job.spec.ranks, 45.0 if not job.spec.interpret else 300.0)

    @property
    def on_gpu(self) -> bool:
        return self.heap != "interpreted"

    @property
    def sizes(self) -> dict[str, int]:
        return SMALL_SIZES if self.on_gpu else TINY_SIZES

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        num_ranks: int | None = None,
        comm_timeout_s: float = 20.0,
        sizes: dict[str, int] | None = None,
        **more: Any,
    ) -> list[Any]:
        """Results of ``fn(comm, *args)`` by rank, on as many ranks as there are unless said otherwise.

        ``more``: as of ``gfdit.comm.spawn``.
        """
        options: dict[str, Any] = {"device": "cuda"} if self.heap == "local" else {}
        options |= (sizes or self.sizes) | more
        return spawn(
            _prepared,
            num_ranks or self.num_ranks,
            self.heap,
            (fn, args),
            timeout_s=self.timeout_s,
            comm_timeout_s=comm_timeout_s,
            start_method="spawn" if self.on_gpu else "forkserver",
            **options,
        )


def _prepared(comm: GroupFreeComm, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if comm.device.type == "cpu":
        importlib.import_module("tests.kernels.interpreter")  # makes it several times faster
        return fn(comm, *args)
    if torch.cuda.current_stream(comm.device) != torch.cuda.default_stream(comm.device):
        return fn(comm, *args)
    torch.cuda.synchronize(comm.device)
    with torch.cuda.stream(torch.cuda.Stream(comm.device)):  # nothing can be captured on the default one
        return fn(comm, *args)


def meet(comm: GroupFreeComm, directory: str, name: str) -> None:
    """Returns when all ranks are here: told by files, whatever their collectives do."""
    Path(directory, f"{name}-{comm.rank}").touch()
    deadline = time.monotonic() + _MEET_TIMEOUT_S
    while len(list(Path(directory).glob(f"{name}-*"))) < comm.world_size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {comm.rank} waited for the others at {name!r}")
        time.sleep(0.002)


def together(comm: GroupFreeComm) -> None:
    """Virtual ranks share a device: none prepares anything on it while another one waits in a kernel."""
    if isinstance(comm.heap, LocalHeap):
        comm.heap.meet()


def one_by_one(comm: GroupFreeComm, call: Callable[[], Any]) -> Any:
    """What ``call`` gives, by virtual ranks after one another: what they share is not made for threads."""
    result = None
    for rank in range(comm.world_size) if isinstance(comm.heap, LocalHeap) else [comm.rank]:
        if rank == comm.rank:
            result = call()
            comm.synchronize()
        together(comm)
    return result


def outcome(comm: GroupFreeComm, call: Callable[[], object]) -> tuple[CommError | None, float]:
    """The error that a call ends in, in itself or on the device, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
        comm.synchronize()
    except CommError as error:
        return error, time.monotonic() - begin
    return None, time.monotonic() - begin


def random_bytes(device: torch.device, num_bytes: int, *key: int) -> torch.Tensor:
    """uint8 that every rank can make again from the same key."""
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % 2**31
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).to(device)


def stale(like: torch.Tensor) -> torch.Tensor:
    """As large, full of old bytes, so that whatever is not written shows."""
    return (
        torch.full((like.nbytes,), 0xAB, dtype=torch.uint8, device=like.device).view(like.dtype).view(like.shape)
    )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.contiguous().reshape(-1), right.contiguous().reshape(-1)
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
