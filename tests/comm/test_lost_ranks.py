"""A rank that is killed or frozen in the middle of every kind of collective, all at once: one lane each.

The survivors' waits see a time of their own. It stands still until the rank is lost and nothing can come any more,
and then passes by what they sleep. So nothing times out before, and how long it takes is exact, however busy the
machine is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gfdit.comm import CommError, CommTimeout, GroupFreeComm, SharedMemoryHeap, host_transport
from gfdit.comm.futex import Waiter
from gfdit.comm.heap import Call
from gfdit.comm.host_transport import HostTransport, Port
from tests.comm.handover import Handover
from tests.comm.worlds import PATIENCE_S, open_world, wait_until

TIMEOUT_S, MARGIN_S = 1.0, 0.1
SURVIVORS, VICTIM = (0, 2), 3
GROUP = (0, VICTIM, 2)
OUTSIDERS = (1, 4)
# Six slots per peer, except for the all-to-all's two.
NUM_BYTES = 6 * 4096
COLLECTIVES = ("barrier", "all_gather", "all_to_all", "broadcast", "all_reduce")
LANES = (*COLLECTIVES, "send", "recv")
# Odd, in an operation of two peers: one of them has the victim's token of this round, the other has not.
PART_OF_COLLECTIVE = 17


class DoomedTransport(HostTransport):
    """Stops for good between two chunks of an operation."""

    num_parts = 0

    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        self.stuck = threading.Event()

    def _push(self, port: Port, call: Call, num_bytes: int, begin: int, address: int) -> None:
        self._count()
        super()._push(port, call, num_bytes, begin, address)

    def _pull(self, port: Port, call: Call, num_bytes: int, begin: int, address: int) -> None:
        self._count()
        super()._pull(port, call, num_bytes, begin, address)

    def _count(self) -> None:
        if self.num_parts == PART_OF_COLLECTIVE:
            self.stuck.set()
            threading.Event().wait()
        self.num_parts += 1


class DoomedHeap(SharedMemoryHeap):
    _transport_class = DoomedTransport


def attempt(comm: GroupFreeComm) -> None:
    """What the lane is named after, once. "send" and "recv" are the victim's, towards rank 0."""
    group = comm.group(GROUP)
    x, out = torch.zeros(NUM_BYTES, dtype=torch.uint8), torch.empty(len(GROUP) * NUM_BYTES, dtype=torch.uint8)
    if comm.lane_name == "barrier":
        comm.barrier(group)
    elif comm.lane_name == "all_gather":
        comm.all_gather_into_tensor(out, x, group)
    elif comm.lane_name == "all_to_all":
        comm.all_to_all_single(out[:NUM_BYTES], x, group)
    elif comm.lane_name == "broadcast":
        comm.broadcast(x, VICTIM, group)
    elif comm.lane_name == "all_reduce":
        comm.all_reduce(x, group)
    elif (comm.lane_name == "send") == (comm.rank == VICTIM):
        comm.send(x, 0 if comm.rank == VICTIM else VICTIM)
    else:
        comm.recv(x, 0 if comm.rank == VICTIM else VICTIM)


def on_lanes(comm: GroupFreeComm, names: tuple[str, ...], fn: Callable[[GroupFreeComm], None]) -> None:
    """Starts one thread per lane."""
    for lane in [comm.lane(name) for name in names]:
        threading.Thread(target=fn, args=(lane,), daemon=True).start()


def repeat(comm: GroupFreeComm) -> None:
    while True:
        attempt(comm)


def doomed(comm: GroupFreeComm, number: int, last_words: str) -> None:
    on_lanes(comm, LANES, repeat)
    for name in LANES:
        assert comm.lane(name)._transport.stuck.wait(PATIENCE_S)
    Path(last_words).touch()
    os.kill(os.getpid(), number)


class OwnTime:
    """In place of the module ``time``. A thread's time passes by what it is told, a microsecond at each look."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def monotonic(self) -> float:
        self.sleep(1e-6)
        return self._thread.now_s

    def sleep(self, duration_s: float) -> None:
        self._thread.now_s = getattr(self._thread, "now_s", 0.0) + duration_s


class HopelessWaiter:
    """Lets time pass when the victim is lost and the other survivor, if it takes part, waits as hopelessly."""

    def __init__(self, waiter: Waiter, own_time: OwnTime, handover: Handover | None, last_words: str) -> None:
        self._waiter = waiter
        self._own_time = own_time
        self._handover = handover
        self._last_words = last_words

    def wait(self, address: int, value: int, timeout_s: float, attempt: int) -> None:
        self._waiter.wait(address, value, timeout_s, attempt)
        if not attempt:
            self._wait = object()
        is_lost = os.path.exists(self._last_words)
        if is_lost and (self._handover is None or self._handover.look(self._wait)):
            self._own_time.sleep(timeout_s)

    def wake(self, address: int) -> None:
        self._waiter.wake(address)


def survivor(comm: GroupFreeComm, last_words: str) -> dict[str, tuple[float, CommError]]:
    """By lane: how long the operation that failed took, and what it raised."""
    heap: Any = comm._heap
    failures: dict[str, tuple[float, CommError]] = {}
    own_time = OwnTime()
    host_transport.time = own_time  # type: ignore[assignment]
    (other,) = set(SURVIVORS) - {comm.rank}
    names = LANES if comm.rank == 0 else COLLECTIVES
    for name in names:
        transport = comm.lane(name)._transport
        handover = Handover(heap, other) if name in COLLECTIVES else None
        transport._waiter = HopelessWaiter(transport._waiter, own_time, handover, last_words)

    def until_error(lane: GroupFreeComm) -> None:
        try:
            while True:
                begin_s = own_time.monotonic()
                attempt(lane)
        except CommError as error:
            failures[lane.lane_name] = (own_time.monotonic() - begin_s, error)

    on_lanes(comm, names, until_error)
    assert wait_until(lambda: len(failures) == len(names)), failures
    Path(f"{last_words}-{comm.rank}").touch()
    return failures


def outsider(comm: GroupFreeComm, last_words: str) -> int:
    """Collectives of a group that shares no rank with the victim's, until all survivors have raised."""
    group, flag, rounds = comm.group(OUTSIDERS), torch.zeros(1), 0
    while not flag.item():
        out = torch.empty(2, 3000)
        comm.all_gather_into_tensor(out, torch.full((3000,), float(comm.rank)), group)
        assert out[:, -1].tolist() == list(OUTSIDERS)
        flag.fill_(rounds > 10 and all(os.path.exists(f"{last_words}-{rank}") for rank in SURVIVORS))
        comm.broadcast(flag, OUTSIDERS[0], group)
        rounds += 1
    return rounds


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_survivors_raise_in_time_in_every_collective(name: str, tmp_path: Path) -> None:
    last_words = str(tmp_path / "stuck")
    with open_world(5, lanes=LANES, scratch_bytes=4096) as world:
        for rank in SURVIVORS:
            world.start(rank, survivor, last_words, comm_timeout_s=TIMEOUT_S)
        for rank in OUTSIDERS:
            world.start(rank, outsider, last_words)
        world.start(VICTIM, doomed, getattr(signal, name), last_words, heap_class=DoomedHeap)
        world.begin(*range(5))
        by_rank = {rank: world.result(rank) for rank in SURVIVORS}
        assert not any(isinstance(result, Exception) for result in by_rank.values()), by_rank
        for rank, failures in by_rank.items():
            for lane, (took_s, error) in failures.items():
                assert type(error) is CommTimeout and error.lane == lane, (rank, lane, error)
                assert TIMEOUT_S < took_s < TIMEOUT_S + MARGIN_S, (rank, lane, took_s, error)
        for lane in LANES:
            edges = {failures[lane][1].edge for failures in by_rank.values() if lane in failures}
            assert edges & {(VICTIM, rank) for rank in by_rank}, (lane, edges)
        assert world.result(OUTSIDERS[0]) == world.result(OUTSIDERS[1]) > 10
