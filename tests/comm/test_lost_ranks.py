"""A rank that is killed or frozen in the middle of every kind of collective, all at once: one lane each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gfdit.comm import CommError, CommTimeout, GroupFreeComm, SharedMemoryHeap
from gfdit.comm.heap import Call
from gfdit.comm.host_transport import HostTransport, Port
from tests.comm.worlds import open_world, wait_until

TIMEOUT_S, MARGIN_S = 1.0, 0.1
VICTIM = 3
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
        assert comm.lane(name)._transport.stuck.wait(10)
    Path(f"{last_words}.new").write_text(str(time.monotonic()))
    Path(f"{last_words}.new").rename(last_words)
    os.kill(os.getpid(), number)


class LateWakeUps(threading.Thread):
    """How long, in total, this process slept too long: what a busy machine adds to every bound."""

    total_s = 0.0

    def run(self) -> None:
        while True:
            begin_s = time.monotonic()
            time.sleep(5e-3)
            late_s = time.monotonic() - begin_s - 5e-3
            self.total_s += late_s if late_s > 2e-3 else 0.0


def survivor(comm: GroupFreeComm) -> tuple[dict[str, tuple[float, float, CommError]], float]:
    """By lane: when the operation that failed began, when it raised, and what. Then what the machine added."""
    failures: dict[str, tuple[float, float, CommError]] = {}
    late = LateWakeUps(daemon=True)
    late.start()

    def until_error(lane: GroupFreeComm) -> None:
        try:
            while True:
                begin_s = time.monotonic()
                attempt(lane)
        except CommError as error:
            failures[lane.lane_name] = (begin_s, time.monotonic(), error)

    names = LANES if comm.rank == 0 else COLLECTIVES
    on_lanes(comm, names, until_error)
    assert wait_until(lambda: len(failures) == len(names), 20), failures
    return failures, late.total_s


def outsider(comm: GroupFreeComm) -> int:
    """Collectives of a group that shares no rank with the victim's, long enough to see it fail."""
    group, flag, rounds = comm.group(OUTSIDERS), torch.zeros(1), 0
    deadline_s = time.monotonic() + 2 * TIMEOUT_S
    while not flag.item():
        out = torch.empty(2, 3000)
        comm.all_gather_into_tensor(out, torch.full((3000,), float(comm.rank)), group)
        assert out[:, -1].tolist() == list(OUTSIDERS)
        flag.fill_(time.monotonic() > deadline_s)
        comm.broadcast(flag, OUTSIDERS[0], group)
        rounds += 1
    return rounds


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_survivors_raise_in_time_in_every_collective(name: str, tmp_path: Path) -> None:
    last_words = tmp_path / "stuck"
    with open_world(5, lanes=LANES) as world:
        for rank in (0, 2):
            world.start(rank, survivor, comm_timeout_s=TIMEOUT_S)
        for rank in OUTSIDERS:
            world.start(rank, outsider, comm_timeout_s=TIMEOUT_S)
        number = getattr(signal, name)
        world.start(VICTIM, doomed, number, str(last_words), heap_class=DoomedHeap)
        world.begin(*range(5))
        by_rank, late_s = {}, {}
        for rank in (0, 2):
            by_rank[rank], late_s[rank] = world.result(rank)
        lost_s = float(last_words.read_text())
        for rank, failures in by_rank.items():
            bound_s = TIMEOUT_S + MARGIN_S + late_s[rank]
            for lane, (begin_s, raised_s, error) in failures.items():
                context = (rank, lane, raised_s - lost_s, late_s, error)
                assert type(error) is CommTimeout and error.lane == lane, context
                assert raised_s - max(begin_s, lost_s) < bound_s, context
        for lane in LANES:
            edges = {failures[lane][2].edge for failures in by_rank.values() if lane in failures}
            assert edges & {(VICTIM, rank) for rank in by_rank}, (lane, edges)
        assert world.result(OUTSIDERS[0]) == world.result(OUTSIDERS[1]) > 10
