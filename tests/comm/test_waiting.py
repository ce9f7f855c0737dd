"""Waiting costs no CPU, wakes promptly, and also works without the futex."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import pytest
import torch

from gfdit.comm import CommAborted, CommTimeout, GroupFreeComm, SharedMemoryHeap, host_transport
from gfdit.comm.futex import Futex, SleepWaiter, default_waiter
from gfdit.comm.memory_order import memory_fence
from tests.comm.handover import LookingHeap, LookingWaiter
from tests.comm.soak import soak
from tests.comm.worlds import open_world, set_timeout, wait_until
from tests.support.waiting import HANG_S

NEEDS_FUTEX = pytest.mark.skipif(not isinstance(default_waiter(), Futex), reason="no futex on this machine")


class LookingFutexHeap(LookingHeap):
    """Sleeps as this machine does by default."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._waiter = LookingWaiter(self.handover, default_waiter())


class PollingHeap(SharedMemoryHeap):
    """A machine without futex."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._waiter = SleepWaiter()


class FencedHeap(SharedMemoryHeap):
    """A machine that needs fences: they are called where they should be."""

    num_fences = 0

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._fence = self.count

    def count(self) -> None:
        self.num_fences += 1


def wait_one_second(comm: GroupFreeComm) -> tuple[float, float]:
    group = comm.group((0, 1))
    if comm.rank == 1:
        comm._heap.handover.let_the_other_go_on()  # into its wait
        time.sleep(1.0)
    begin, cpu_begin = time.monotonic(), time.process_time()
    comm.barrier(group)
    return time.monotonic() - begin, time.process_time() - cpu_begin


@pytest.mark.parametrize("heap_class", [LookingFutexHeap, LookingHeap])
def test_a_rank_that_waits_a_second_uses_little_cpu(heap_class) -> None:
    """A tenth of the time that it waits, at most, which is longer on a busy machine."""
    with open_world(2, scratch_bytes=4096) as world:
        world.start_all(wait_one_second, heap_class=heap_class)
        waited_s, cpu_s = world.result(0)
    assert waited_s >= 1.0
    assert cpu_s < 0.1 * waited_s


@pytest.mark.parametrize("heap_class", [PollingHeap, FencedHeap])
def test_the_other_machines_run_the_same_programs(heap_class) -> None:
    with open_world(4) as world:
        world.start_all(soak, 5, 150, False, heap_class=heap_class)
        assert all(isinstance(performed, int) for performed in world.results())


def test_fences_surround_every_signal() -> None:
    descriptor = SharedMemoryHeap.create(2, slot_bytes=4096)
    heaps = [FencedHeap.attach(descriptor, rank) for rank in range(2)]
    descriptor.unlink()
    sender, receiver = (GroupFreeComm(heap, timeout_s=HANG_S) for heap in heaps)
    sender.send(torch.zeros(3), 1)
    assert heaps[0].num_fences == 1  # release
    receiver.recv(torch.empty(3), 0)
    assert heaps[1].num_fences == 2  # acquire, and the release of the credit


def test_fences_by_machine() -> None:
    assert memory_fence("x86_64", "linux") is None
    assert memory_fence("AMD64", "win32") is None
    with pytest.raises(RuntimeError, match="no memory fence known"):
        memory_fence("sparc", "sunos")


LONG_SLEEP_S = 60.0


def wakes(comm: GroupFreeComm) -> float:
    """How long a receiver takes that falls asleep 30 times, for a minute each unless it is woken."""
    host_transport._SLEEP_SLICE_S = LONG_SLEEP_S
    begin = time.monotonic()
    for step in range(30):
        if comm.rank == 0:
            assert wait_until(lambda: comm._heap.handover.others_looks > step)  # noqa: B023
            time.sleep(0.002)  # it sleeps by now, or finds when it is about to that it need not
            comm.send(torch.zeros(1), 1)
        else:
            comm.recv(torch.empty(1), 0)
    return time.monotonic() - begin


@NEEDS_FUTEX
def test_a_sleeper_is_woken_not_polled() -> None:
    with open_world(2, scratch_bytes=4096) as world:
        world.start_all(wakes, heap_class=LookingFutexHeap)
        assert world.result(1) < LONG_SLEEP_S


@NEEDS_FUTEX
def test_futex() -> None:
    waiter, word = default_waiter(), ctypes.c_uint64(2**40 + 5)
    address = ctypes.addressof(word)
    begin = time.monotonic()
    waiter.wait(address, 2**40 + 6, LONG_SLEEP_S, 0)  # another value already: no sleep
    assert time.monotonic() - begin < LONG_SLEEP_S
    begin = time.monotonic()
    waiter.wait(address, 2**40 + 5, 0.05, 0)
    assert time.monotonic() - begin > 0.04

    def change() -> None:
        time.sleep(0.05)
        word.value += 1
        waiter.wake(address)

    thread = threading.Thread(target=change)
    thread.start()
    waiter.wait(address, 2**40 + 5, LONG_SLEEP_S, 0)
    assert time.monotonic() - begin < LONG_SLEEP_S
    thread.join()


def interrupted(comm: GroupFreeComm) -> None:
    """A wait that is interrupted leaves the lane free and the edge refusing, not half-done."""
    pid = torch.tensor([os.getpid()])
    if comm.rank == 1:
        comm.recv(pid, 0)
        comm._heap.handover.let_the_other_go_on()  # into its wait
        os.kill(int(pid), signal.SIGALRM)
        return

    def stop(*args) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    comm.send(pid, 1)
    with pytest.raises(KeyboardInterrupt):
        comm.recv(torch.empty(1), 1)
    with pytest.raises(CommAborted, match="needs a reset since KeyboardInterrupt"):
        comm.recv(torch.empty(1), 1)
    comm.reset((1,))
    set_timeout(comm, 0.2)  # nothing is to come
    with pytest.raises(CommTimeout):
        comm.recv(torch.empty(1), 1)


def test_a_wait_can_be_interrupted() -> None:
    with open_world(2, scratch_bytes=4096) as world:
        world.start_all(interrupted, heap_class=LookingFutexHeap)
        assert world.results() == [None, None]
