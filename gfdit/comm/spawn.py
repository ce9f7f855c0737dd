"""Run a function on a world of ranks and collect the results: for scripts, tests and benchmarks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from gfdit.comm.group_free_comm import GroupFreeComm
from gfdit.comm.heap_descriptor import DEFAULT_LANES, HeapDescriptor
from gfdit.comm.heaps import HEAPS, attach_heap, create_heap
from gfdit.comm.local_heap import LocalHeap
from gfdit.comm.local_ranks import run_local_ranks

_ATTACHED, _RESULT, _ERROR = "attached", "result", "error"
_EXIT_S = 5.0


class RankFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """A rank died, did not answer in time, or raised something that cannot be pickled."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    heap: str = "shared_memory",
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 300.0,
    comm_timeout_s: float = 240.0,
    lanes: Sequence[str] = DEFAULT_LANES,
    start_method: str = "spawn",
    device: str = "cpu",
    selector_table: str = "",
    devices: Sequence[str | int] = (),
    **sizes: int,
) -> list[Any]:
    """Run ``fn(comm, *args)`` on every rank; returns the results by rank.

    ``heap``: "shared_memory" (CPU), "torch_symmetric" (a GPU per rank), "interpreted" (CPU, kernels run by
    Triton's interpreter), each with one process per rank; or "local": virtual ranks on ``device``, in threads of
    this process. ``sizes``: those of ``HeapDescriptor``.
    ``selector_table``: file with measurements to choose paths by. ``devices``: one for each rank of
    "torch_symmetric", see ``gfdit.comm.devices``; several ranks may share one.

    Between processes ``fn``, ``args`` and results are pickled by value, and each rank has one torch thread. The
    first exception of a rank is raised again here, with a note that names the rank and its traceback; RankFailed
    stands in for a rank that died, and for all when ``timeout_s`` (start included) runs out. The other ranks are
    killed then; threads are aborted. ``comm_timeout_s`` is the communicator's timeout.
    ``start_method="forkserver"`` imports torch once for many calls; the default starts from a clean
    interpreter each time. Raises ValueError for an unknown heap or bad arguments.
    """
    options = {"lanes": lanes, "selector_table": selector_table, **sizes}
    if heap == "local":
        if devices:
            raise ValueError("virtual ranks share one device: name it by device, not devices")
        heaps = LocalHeap.create(world_size, device=device, **options)  # type: ignore[arg-type]
        try:
            return run_local_ranks(fn, heaps, args, timeout_s=timeout_s, comm_timeout_s=comm_timeout_s)
        except TimeoutError as error:
            raise RankFailed(0, str(error)) from None
    if heap not in HEAPS:
        raise ValueError(f"unknown heap {heap!r}; known: {', '.join(map(repr, ('local', *HEAPS)))}")
    payload = pickle.dumps((fn, tuple(args)))
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["gfdit.comm"])
    descriptor = create_heap(heap, world_size, devices=devices, **options)  # type: ignore[arg-type]
    world = _World(descriptor)
    try:
        for rank in range(world_size):
            world.start(context, rank, payload, comm_timeout_s)
        results = world.collect(time.monotonic() + timeout_s)
        world.join(_EXIT_S)
        return results
    finally:
        world.kill()
        descriptor.unlink()


class _World:
    """The parent's side: processes and result pipes by rank."""

    def __init__(self, descriptor: HeapDescriptor) -> None:
        self._descriptor = descriptor
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def start(self, context: Any, rank: int, payload: bytes, comm_timeout_s: float) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank_main,
            args=(self._descriptor, rank, payload, comm_timeout_s, theirs),
            name=f"gfdit-rank-{rank}",
            daemon=True,
        )
        process.start()
        theirs.close()  # the rank's copy is the last one, so the pipe ends when the rank does
        self._processes.append(process)
        self._pipes.append(ours)

    def collect(self, deadline: float) -> list[Any]:
        """Results by rank. Raises what a rank raised, or RankFailed."""
        results: dict[int, Any] = {}
        num_attached, num_ranks = 0, len(self._pipes)
        while len(results) < num_ranks:
            pending = {self._pipes[rank]: rank for rank in range(num_ranks) if rank not in results}
            ready: list[Any] = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = sorted(pending.values())
                raise RankFailed(ranks[0], f"no result in time; still running: ranks {ranks}")
            for pipe in ready:
                kind, value = self._receive(pipe, pending[pipe])
                if kind == _RESULT:
                    results[pending[pipe]] = value
                elif kind == _ATTACHED:
                    num_attached += 1
                    if num_attached == num_ranks:
                        self._begin()
        return [results[rank] for rank in range(num_ranks)]

    def _begin(self) -> None:
        """Every rank has attached: from here on nothing can leak, and no timeout pays for a slow start."""
        self._descriptor.unlink()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that died meanwhile: ``collect`` reads the end of its pipe
                pipe.send_bytes(b"begin")

    def _receive(self, pipe: Connection, rank: int) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_EXIT_S)
            raise RankFailed(rank, f"died with exit code {self._processes[rank].exitcode}") from None
        if kind == _ERROR:
            raise value
        return kind, value

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()


def _rank_main(
    descriptor: HeapDescriptor, rank: int, payload: bytes, comm_timeout_s: float, pipe: Connection
) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if descriptor.kind == "interpreted":
        # Triton decides when it is imported, which the function may do.
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        fn, args = pickle.loads(payload)
        with contextlib.closing(attach_heap(descriptor, rank)) as heap:
            comm = GroupFreeComm(heap, timeout_s=comm_timeout_s)
            comm.warm_up()
            pipe.send_bytes(pickle.dumps((_ATTACHED, None)))
            pipe.recv_bytes()
            answer = pickle.dumps((_RESULT, fn(comm, *args)))
    except BaseException as error:
        answer = _pickled_error(error, rank, descriptor.world_size)
    pipe.send_bytes(answer)


def _pickled_error(error: BaseException, rank: int, world_size: int) -> bytes:
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"raised in rank {rank} of {world_size}:\n{trace}")
    try:
        answer = pickle.dumps((_ERROR, error.with_traceback(None)))
        pickle.loads(answer)  # some exceptions pickle but do not come back
        return answer
    except Exception:
        return pickle.dumps((_ERROR, RankFailed(rank, f"raised\n{trace}")))


def _exit_with_parent() -> None:
    """A parent that is killed outright cannot take its ranks along."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
