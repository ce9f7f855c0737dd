"""A rank that is killed or frozen in the middle of every kind of collective by kernels, all at once: a lane each.

Kernels are interpreted, so a wait looks at the clock between polls that take milliseconds. What the slowest of
these intervals was is measured, and added to what a survivor may take.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gfdit.comm import CommError, CommTimeout, GroupFreeComm
from tests.comm.test_failures import gather_ranks
from tests.comm.test_lost_ranks import LateWakeUps, on_lanes
from tests.comm.worlds import open_world, wait_until
from tests.kernels.test_containment import meet, set_timeout
from tests.kernels.worlds import InterpretedHeap

TIMEOUT_S, MARGIN_S = 1.0, 0.1
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
    """Every operation once: the first launch of a kernel takes longer than the timeout."""
    for name in (*LANES, UNRELATED):
        set_timeout(comm.lane(name), 60.0)
        if name != UNRELATED:
            if name not in ("send", "recv") or comm.rank in (0, VICTIM):
                attempt(comm.lane(name))
        elif comm.rank in SURVIVORS:
            unrelated(comm.lane(name), torch.zeros(1))
        set_timeout(comm.lane(name), TIMEOUT_S)


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
    assert wait_until(lambda: num_stuck() == len(LANES), 60), num_stuck()
    Path(f"{last_words}.new").write_text(str(time.monotonic()))
    Path(f"{last_words}.new").rename(last_words)
    os.kill(os.getpid(), number)


class Looks:
    """When waiting threads looked at the clock: the longest time that passed between two of a wait's looks."""

    longest_s = 0.0

    def __init__(self) -> None:
        import triton.language as tl

        from gfdit.kernels import edges, low_latency

        self._last = threading.local()
        self._look_around, self._conclude = edges.look_around, edges.conclude
        for module in (edges, low_latency):
            module.LOOK_AROUND = tl.constexpr(4)  # the product's figure is for polls of a microsecond
            module.look_around, module.conclude = self._looked, self._concluded

    def _looked(self, *args: Any) -> Any:
        now_s = time.monotonic()
        last_s = getattr(self._last, "time_s", None)
        if last_s is not None:
            self.longest_s = max(self.longest_s, now_s - last_s)
        self._last.time_s = now_s
        return self._look_around(*args)

    def _concluded(self, *args: Any) -> Any:
        self._last.time_s = None
        return self._conclude(*args)


def survivor(comm: GroupFreeComm) -> tuple[dict[str, tuple[float, float, CommError]], float, int]:
    """By lane: when the operation that failed began, when it raised, and what. Then by how much it may be late.

    Last, how many rounds an unrelated group finished until all lanes of both survivors had failed.
    """
    warm_up(comm)
    failures: dict[str, tuple[float, float, CommError]] = {}
    late, looks = LateWakeUps(daemon=True), Looks()
    late.start()

    def until_error(lane: GroupFreeComm) -> None:
        begin_s = time.monotonic()
        try:
            while True:
                begin_s = time.monotonic()
                attempt(lane)
        except CommError as error:
            failures[lane.lane_name] = (begin_s, time.monotonic(), error)

    names = LANES if comm.rank == 0 else COLLECTIVES
    num_done, num_rounds = torch.zeros(1), 0
    on_lanes(comm, names, until_error)
    while num_done.item() < len(SURVIVORS):
        num_done.fill_(len(failures) == len(names))
        unrelated(comm.lane(UNRELATED), num_done)
        num_rounds += 1
    return failures, late.total_s + looks.longest_s, num_rounds


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_survivors_raise_in_time_in_every_collective(name: str, tmp_path: Path) -> None:
    last_words = tmp_path / "stuck"
    lanes = (*LANES, UNRELATED)
    with open_world(3, lanes=lanes, slot_bytes=SLOT_BYTES, low_latency_bytes=LOW_LATENCY_BYTES) as world:
        options: dict[str, Any] = {"heap_class": InterpretedHeap, "comm_timeout_s": TIMEOUT_S}
        for rank in SURVIVORS:
            world.start(rank, survivor, **options)
        world.start(VICTIM, doomed, getattr(signal, name), str(last_words), **options)
        world.begin(*range(3))
        by_rank = {rank: world.result(rank, 120) for rank in SURVIVORS}
        assert not any(isinstance(result, Exception) for result in by_rank.values()), by_rank
        lost_s = float(last_words.read_text())
        for rank, (failures, extra_s, num_rounds) in by_rank.items():
            assert num_rounds > 2
            for lane, (begin_s, raised_s, error) in failures.items():
                context = (rank, lane, raised_s - lost_s, extra_s, error)
                assert type(error) is CommTimeout and error.lane == lane, context
                assert raised_s - max(begin_s, lost_s) < TIMEOUT_S + MARGIN_S + extra_s, context
        for lane in LANES:
            edges = {failures[lane][2].edge for failures, _, _ in by_rank.values() if lane in failures}
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
    set_timeout(comm, TIMEOUT_S)
    try:
        for _ in range(100):
            all_kinds(comm, GROUP)
            if comm.rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
    except CommError as caught:
        error = caught
    set_timeout(comm, 60.0)
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
        options: dict[str, Any] = {"heap_class": InterpretedHeap, "comm_timeout_s": 60.0}
        world.start_all(killed, str(tmp_path), **options)
        assert world.result(VICTIM) is None
        world.start(VICTIM, rejoin, **options)
        world.begin(VICTIM)
        errors = [world.result(rank) for rank in SURVIVORS]
        assert all(isinstance(error, CommTimeout) for error in errors), errors
        assert {error.edge for error in errors} & {(VICTIM, rank) for rank in SURVIVORS}
        assert world.result(VICTIM) == "rejoined"
