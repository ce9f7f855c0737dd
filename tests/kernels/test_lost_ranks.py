"""A rank that is killed or frozen in the middle of every kind of collective by kernels, all at once: a lane each.

As in ``tests.comm.test_lost_ranks`` the survivors' waits see a time of their own, which stands still until the
rank is lost and nothing can come any more.
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

from gfdit.comm import CommError, CommTimeout, GroupFreeComm
from tests.comm.handover import Handover
from tests.comm.test_failures import expect, gather_ranks
from tests.comm.test_lost_ranks import on_lanes
from tests.comm.worlds import PATIENCE_S, open_world, set_timeout, wait_until
from tests.kernels.test_containment import meet
from tests.kernels.worlds import InterpretedHeap

TIMEOUT_S, MARGIN_S = 1.0, 0.1
# How much of their own time the survivors' waits let pass between two looks: far more than a wait on a GPU does.
LOOK_S = 0.05
SURVIVORS, VICTIM = (0, 1), 2
GROUP = (0, VICTIM, 1)
SLOT_BYTES = LOW_LATENCY_BYTES = 1024
# Six slots per peer, except for the all-to-all's two.
NUM_BYTES = 6 * SLOT_BYTES
COLLECTIVES = ("barrier", "all_gather", "all_to_all", "broadcast", "all_reduce", "small_gather", "small_broadcast")
LANES = (*COLLECTIVES, "send", "recv")
UNRELATED = "unrelated"
# In the second operation of the larger ones: after some of its tokens are out, and before others.
STORES_UNTIL_STUCK = 9


def attempt(comm: GroupFreeComm) -> None:
    """What the lane is named after, once. "send" and "recv" are the victim's, towards rank 0."""
    group = comm.group(GROUP)
    num_bytes = 256 if comm.lane_name.startswith("small") else NUM_BYTES
    x, out = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(len(GROUP) * num_bytes, dtype=torch.uint8)
    if comm.lane_name == "barrier":
        comm.barrier(group)
    elif comm.lane_name.endswith("gather"):
        comm.all_gather_into_tensor(out, x, group)
    elif comm.lane_name == "all_to_all":
        comm.all_to_all_single(out[:num_bytes], x, group)
    elif comm.lane_name.endswith("broadcast"):
        comm.broadcast(x, VICTIM, group)
    elif comm.lane_name == "all_reduce":
        comm.all_reduce(x, group)
    elif (comm.lane_name == "send") == (comm.rank == VICTIM):
        comm.send(x, 0 if comm.rank == VICTIM else VICTIM)
    else:
        comm.recv(x, 0 if comm.rank == VICTIM else VICTIM)


def repeat(comm: GroupFreeComm) -> None:
    while True:
        attempt(comm)


def warm_up(comm: GroupFreeComm) -> None:
    """Every operation once, for the interpreter prepares functions at their first call: not in several threads."""
    for name in LANES:
        if name not in ("send", "recv") or comm.rank in (0, VICTIM):
            attempt(comm.lane(name))
    if comm.rank in SURVIVORS:
        unrelated(comm.lane(UNRELATED), torch.zeros(1))


def unrelated(comm: GroupFreeComm, flag: torch.Tensor) -> None:
    """What the survivors do among themselves."""
    group = comm.group(SURVIVORS)
    comm.barrier(group)
    comm.all_reduce(flag, group)


def stop_before_a_store() -> Callable[[], int]:
    """From now on, each thread stops for good before a certain store to shared words; returns how many have."""
    from triton.runtime import interpreter

    stores = threading.local()
    stuck: list[int] = []
    exchange = interpreter._ir.ATOMIC_OP.XCHG
    access = interpreter.InterpreterBuilder.create_atomic_rmw

    def counted(self: Any, operation: Any, *args: Any) -> Any:
        if operation == exchange:
            stores.count = getattr(stores, "count", 0) + 1
            if stores.count == STORES_UNTIL_STUCK:
                stuck.append(threading.get_ident())
                threading.Event().wait()
        return access(self, operation, *args)

    interpreter.InterpreterBuilder.create_atomic_rmw = counted
    return lambda: len(stuck)


def doomed(comm: GroupFreeComm, number: int, last_words: str) -> None:
    warm_up(comm)
    num_stuck = stop_before_a_store()
    on_lanes(comm, LANES, repeat)
    assert wait_until(lambda: num_stuck() == len(LANES)), num_stuck()
    Path(last_words).touch()
    os.kill(os.getpid(), number)


class OwnTime:
    """The time of each lane, in place of the clock that its kernels read."""

    def __init__(self, last_words: str) -> None:
        import triton.language as tl

        from gfdit.kernels import edges, low_latency

        self._last_words = last_words
        self._clock_index = edges.LANE_CLOCK.value
        self._look_around = edges.look_around
        self._thread = threading.local()
        for module in (edges, low_latency):
            module.look_around = self._look
        edges.LOOK_AROUND = low_latency.LOOK_AROUND = tl.constexpr(1)

    def begin(self, lane: GroupFreeComm, handover: Handover | None) -> None:
        """For this thread, the only one of ``lane``. ``handover``: with another survivor that takes part."""
        self._thread.handover = handover
        self._thread.now_ns = torch.ones(1, dtype=torch.int64)
        transport: Any = lane._transport
        transport._state.constants[self._clock_index] = self._thread.now_ns.data_ptr()

    def now_s(self) -> float:
        return int(self._thread.now_ns) / 1e9

    def _look(self, opened: Any, deadline: Any) -> Any:
        """Time passes when the victim is lost and the other survivor, if it takes part, waits as hopelessly."""
        if hasattr(self._thread, "now_ns") and os.path.exists(self._last_words):
            handover = self._thread.handover
            # A deadline is made once for each wait.
            if handover is None or handover.look(deadline):
                self._thread.now_ns += int(LOOK_S * 1e9)
        return self._look_around(opened, deadline)


def survivor(comm: GroupFreeComm, last_words: str) -> tuple[dict[str, tuple[float, CommError]], int]:
    """By lane: how long the operation that failed took, and what it raised.

    Then how many rounds an unrelated group finished, at least until all lanes of both survivors had failed.
    """
    warm_up(comm)
    failures: dict[str, tuple[float, CommError]] = {}
    own_time = OwnTime(last_words)
    heap: Any = comm._heap
    (other,) = set(SURVIVORS) - {comm.rank}
    names = LANES if comm.rank == 0 else COLLECTIVES
    handovers = {name: Handover(heap, other) for name in COLLECTIVES}

    def until_error(lane: GroupFreeComm) -> None:
        own_time.begin(lane, handovers.get(lane.lane_name))
        try:
            while True:
                begin_s = own_time.now_s()
                attempt(lane)
        except CommError as error:
            failures[lane.lane_name] = (own_time.now_s() - begin_s, error)

    for name in names:
        set_timeout(comm.lane(name), TIMEOUT_S)
    on_lanes(comm, names, until_error)
    num_done, num_rounds = torch.zeros(1), 0
    while num_done.item() < len(SURVIVORS):
        num_rounds += 1
        num_done.fill_(len(failures) == len(names) and num_rounds > 2)
        unrelated(comm.lane(UNRELATED), num_done)
    return failures, num_rounds


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_survivors_raise_in_time_in_every_collective(name: str, tmp_path: Path) -> None:
    last_words = str(tmp_path / "stuck")
    sizes = {"slot_bytes": SLOT_BYTES, "low_latency_bytes": LOW_LATENCY_BYTES, "scratch_bytes": 4096}
    with open_world(3, lanes=(*LANES, UNRELATED), **sizes) as world:
        for rank in SURVIVORS:
            world.start(rank, survivor, last_words, heap_class=InterpretedHeap)
        world.start(VICTIM, doomed, getattr(signal, name), last_words, heap_class=InterpretedHeap)
        world.begin(*range(3))
        by_rank = {rank: world.result(rank) for rank in SURVIVORS}
        assert not any(isinstance(result, Exception) for result in by_rank.values()), by_rank
        for rank, (failures, num_rounds) in by_rank.items():
            assert num_rounds > 2
            for lane, (took_s, error) in failures.items():
                assert type(error) is CommTimeout and error.lane == lane, (rank, lane, error)
                assert TIMEOUT_S < took_s < TIMEOUT_S + MARGIN_S, (rank, lane, took_s, error)
        for lane in LANES:
            edges = {failures[lane][1].edge for failures, _ in by_rank.values() if lane in failures}
            assert edges & {(VICTIM, rank) for rank in by_rank}, (lane, edges)


def all_kinds(comm: GroupFreeComm, ranks: tuple[int, ...]) -> None:
    """By slots and by low-latency slots, with checked results."""
    for rows in (1, 500):
        gather_ranks(comm, ranks, rows)
        x = torch.full((rows,), comm.rank)
        comm.broadcast(x, ranks[1], comm.group(ranks))
        assert x.tolist() == [ranks[1]] * rows


def killed(comm: GroupFreeComm, directory: str) -> object:
    """The victim kills itself; the others recover between themselves, then with the rank that replaces it."""
    all_kinds(comm, GROUP)
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    set_timeout(comm, 0.5)  # it does not come again
    error, _ = expect(CommTimeout, lambda: all_kinds(comm, GROUP))
    set_timeout(comm, PATIENCE_S)
    meet(Path(directory), "quiet", comm.rank, len(SURVIVORS))
    comm.reset(SURVIVORS)
    all_kinds(comm, SURVIVORS)
    meet(Path(directory), "recovered", comm.rank, len(SURVIVORS))
    assert rejoin(comm) == "rejoined"
    return error


def rejoin(comm: GroupFreeComm) -> str:
    comm.reset(GROUP, generation=9)
    for _ in range(2):
        all_kinds(comm, GROUP)
    return "rejoined"


def test_a_killed_rank_can_be_replaced(tmp_path: Path) -> None:
    with open_world(3, slot_bytes=SLOT_BYTES, low_latency_bytes=LOW_LATENCY_BYTES) as world:
        world.start_all(killed, str(tmp_path), heap_class=InterpretedHeap)
        assert world.result(VICTIM) is None
        # Not while somebody still waits for the one that it replaces.
        assert wait_until(lambda: len(list(tmp_path.glob("quiet-*"))) == len(SURVIVORS))
        world.start(VICTIM, rejoin, heap_class=InterpretedHeap)
        world.begin(VICTIM)
        errors = [world.result(rank) for rank in SURVIVORS]
        assert all(isinstance(error, CommTimeout) for error in errors), errors
        assert {error.edge for error in errors} & {(VICTIM, rank) for rank in SURVIVORS}
        assert world.result(VICTIM) == "rejoined"
