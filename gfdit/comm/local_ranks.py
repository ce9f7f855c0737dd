"""Run a function on all virtual ranks of a local heap, a thread each: what ``spawn(heap="local")`` does."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gfdit.comm.group_free_comm import GroupFreeComm
from gfdit.comm.local_heap import LocalHeap


def run_local_ranks(
    fn: Callable[..., Any],
    heaps: Sequence[LocalHeap],
    args: Sequence[Any],
    *,
    timeout_s: float,
    comm_timeout_s: float,
) -> list[Any]:
    """``fn(comm, *args)`` in one thread per heap, on its stream; returns the results by rank.

    Raises the first exception of a rank, after the others were aborted and had ``comm_timeout_s`` to end;
    TimeoutError if there are results missing after ``timeout_s``. Threads cannot be killed: one that neither
    communicates nor ends is left behind.
    """
    world = _World(fn, args, len(heaps), comm_timeout_s)
    threads = [threading.Thread(target=world.run, args=(heap,), daemon=True) for heap in heaps]
    for thread in threads:
        thread.start()
    try:
        return world.collect(time.monotonic() + timeout_s)
    except BaseException:
        world.abort()
        raise
    finally:
        give_up = time.monotonic() + comm_timeout_s
        for thread in threads:
            thread.join(max(0.0, give_up - time.monotonic()))


class _World:
    """What the threads share. Kernels are loaded before any rank begins: loading may wait for running ones."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], num_ranks: int, comm_timeout_s: float) -> None:
        self._fn = fn
        self._args = args
        self._num_ranks = num_ranks
        self._comm_timeout_s = comm_timeout_s
        self._comms: dict[int, GroupFreeComm] = {}
        self._outcomes: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def run(self, heap: LocalHeap) -> None:
        """Body of a rank's thread."""
        try:
            with _on_stream(heap):
                comm = self._comms[heap.rank] = GroupFreeComm(heap, timeout_s=self._comm_timeout_s)
                comm.warm_up()
                heap.meet()
                result = self._fn(comm, *self._args)
                if heap.stream is not None:
                    heap.stream.synchronize()
                comm.check()
            self._outcomes.put((heap.rank, result, None))
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))
            error.add_note(f"raised in virtual rank {heap.rank} of {heap.world_size}:\n{trace}")
            self._outcomes.put((heap.rank, None, error))
            heap.leave()

    def collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self._num_ranks:
            try:
                rank, result, error = self._outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(self._num_ranks)) - set(results))
                raise TimeoutError(f"no result in time; still running: ranks {missing}") from None
            if error is not None:
                raise error
            results[rank] = result
        return [results[rank] for rank in range(self._num_ranks)]

    def abort(self) -> None:
        for comm in list(self._comms.values()):
            for lane in comm.open_lanes():
                lane.abort(range(comm.world_size))


@contextlib.contextmanager
def _on_stream(heap: LocalHeap) -> Iterator[None]:
    if heap.stream is None:
        yield
    else:
        with torch.cuda.device(heap.device), torch.cuda.stream(heap.stream):
            yield
