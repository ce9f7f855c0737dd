"""Rank processes for the tests: healthy worlds through ``spawn``, and worlds where ranks may die or be altered.

Every rank runs with a tripwire on process groups, so "no process group" is checked by every test.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gfdit.comm import GroupFreeComm, SharedMemoryHeap, spawn
from gfdit.comm.shared_memory_heap import DEFAULT_LANES
from tests.support.waiting import HANG_S

START_METHOD = "forkserver"
# Each rank would import them, and rewrite kernels for the interpreter: more than most programs of a test take.
PRELOAD = ["gfdit.comm", "pytest", "tests.comm.worlds", "tests.kernels.preloaded"]
# How long what must happen may take: no figure of speed, but the limit after which a test is broken.
PATIENCE_S = HANG_S / 2


@functools.cache
def start_fork_server() -> None:
    """Once for a process of the tests; ``spawn`` finds it running."""
    multiprocessing.get_context(START_METHOD).set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """``spawn`` with test defaults: results of ``fn(comm, *args)`` by rank."""
    start_fork_server()
    options = {
        "timeout_s": 2 * PATIENCE_S,
        "comm_timeout_s": PATIENCE_S,
        "start_method": START_METHOD,
        **options,
    }
    return spawn(guarded, world_size, args=(fn, args), **options)


def run_virtual_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """The same on threads of this process."""
    options = {"timeout_s": PATIENCE_S, "comm_timeout_s": PATIENCE_S, **options}
    return spawn(fn, world_size, heap="local", args=args, **options)


def guarded(comm: GroupFreeComm, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    def tripped(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process group was created")

    torch.distributed.init_process_group = tripped
    torch.distributed.new_group = tripped
    try:
        return fn(comm, *args)
    finally:
        assert not torch.distributed.is_initialized()


class World:
    """Ranks as separate processes that may die, be started again, or use an altered heap class."""

    def __init__(
        self, world_size: int, *, slot_bytes: int = 4096, lanes: Sequence[str] = DEFAULT_LANES, **sizes: int
    ) -> None:
        """``sizes``: of the other areas, as ``SharedMemoryHeap.create`` takes them."""
        self.descriptor = SharedMemoryHeap.create(world_size, slot_bytes=slot_bytes, lanes=lanes, **sizes)
        start_fork_server()
        self._context = multiprocessing.get_context(START_METHOD)
        self._ranks: dict[int, tuple[Any, Any]] = {}

    def start(
        self,
        rank: int,
        fn: Callable[..., Any],
        *args: Any,
        comm_timeout_s: float = PATIENCE_S,
        heap_class: type[SharedMemoryHeap] = SharedMemoryHeap,
    ) -> None:
        ours, theirs = self._context.Pipe()
        payload = pickle.dumps((heap_class, fn, args))
        process = self._context.Process(
            target=_run_rank, args=(self.descriptor, rank, payload, comm_timeout_s, theirs), daemon=True
        )
        process.start()
        theirs.close()
        self._ranks[rank] = (process, ours)

    def begin(self, *ranks: int) -> None:
        """Let ranks go on once all of them are there: a slow start must not eat into short timeouts."""
        for rank in ranks:
            assert self._ranks[rank][1].recv_bytes() == b"attached"
        for rank in ranks:
            self._ranks[rank][1].send_bytes(b"begin")

    def start_all(self, fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        ranks = range(self.descriptor.world_size)
        for rank in ranks:
            self.start(rank, fn, *args, **options)
        self.begin(*ranks)

    def result(self, rank: int, timeout_s: float = 2 * PATIENCE_S) -> Any:
        """What the rank returned, the exception it raised, or None if it died."""
        process, pipe = self._ranks[rank]
        assert pipe.poll(timeout_s), f"rank {rank} did not finish"
        try:
            value = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            value = None
        process.join(5.0)
        return value

    def results(self) -> list[Any]:
        return [self.result(rank) for rank in sorted(self._ranks)]

    def close(self) -> None:
        for process, pipe in self._ranks.values():
            process.kill()
            process.join()
            pipe.close()
        self.descriptor.unlink()


@contextmanager
def open_world(world_size: int, **options: Any):
    world = World(world_size, **options)
    try:
        yield world
    finally:
        world.close()


def _run_rank(descriptor: Any, rank: int, payload: bytes, comm_timeout_s: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    heap_class, fn, args = pickle.loads(payload)
    try:
        with heap_class.attach(descriptor, rank) as heap:
            pipe.send_bytes(b"attached")
            pipe.recv_bytes()
            answer = guarded(GroupFreeComm(heap, timeout_s=comm_timeout_s), fn, args)
    except Exception as error:
        answer = error
    pipe.send_bytes(pickle.dumps(answer))


def random_bytes(num_bytes: int, *key: int) -> torch.Tensor:
    """uint8 that every rank can regenerate from the same key."""
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % 2**31
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, *key: int) -> torch.Tensor:
    """Random bits in ``dtype`` (bool: 0 or 1); compare with ``same_bits``, since floats may be NaN."""
    if dtype == torch.bool:
        return random_tensor(shape, torch.uint8, *key) % 2 == 1
    num_elements = 1
    for extent in shape:
        num_elements *= extent
    return random_bytes(num_elements * dtype.itemsize, *key).view(dtype).view(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = left.contiguous().reshape(-1), right.contiguous().reshape(-1)
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def stale(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An output full of old bytes, so that whatever is not written shows."""
    num_elements = 1
    for extent in shape:
        num_elements *= extent
    fill = torch.full((num_elements * dtype.itemsize,), 1 if dtype == torch.bool else 0xAB, dtype=torch.uint8)
    return fill.view(dtype).view(shape)


def heap_files() -> set[str]:
    directory = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
    return {name for name in os.listdir(directory) if name.startswith(f"gfdit-heap-{os.getpid()}-")}


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S, pause_s: float = 0.01) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


def set_timeout(comm: GroupFreeComm, timeout_s: float) -> None:
    """From its next wait on, of this lane, whatever transport it has.

    For what has to end in a time-out: only where nobody is to come, so that a slow machine cannot be the cause.
    """
    transport = comm._transport
    if hasattr(transport, "_timeout_s"):
        transport._timeout_s = timeout_s
    else:
        from gfdit.kernels import edges

        transport._state.constants[edges.LANE_TIMEOUT_NS.value] = int(timeout_s * 1e9)
        transport._failures._timeout_s = timeout_s
