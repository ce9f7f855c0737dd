"""Waiting costs no CPU, wakes promptly, and also works without the futex."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from gfdit.comm import CommTimeout, GroupFreeComm, SharedMemoryHeap
from gfdit.comm.futex import Futex, SleepWaiter, default_waiter
from gfdit.comm.memory_order import memory_fence
from tests.comm.soak import soak
from tests.comm.worlds import open_world, run_ranks


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
    comm.barrier(group)
    if comm.rank == 1:
        time.sleep(1.0)
    begin, cpu_begin = time.monotonic(), time.process_time()
    comm.barrier(group)
    return time.monotonic() - begin, time.process_time() - cpu_begin


@pytest.mark.parametrize("heap_class", [SharedMemoryHeap, PollingHeap])
def test_a_rank_that_waits_a_second_uses_little_cpu(heap_class) -> None:
    with open_world(2) as world:
        world.start_all(wait_one_second, heap_class=heap_class)
        waited_s, cpu_s = world.result(0)
    assert waited_s > 0.8
    assert cpu_s < 0.1


@pytest.mark.parametrize("heap_class", [PollingHeap, FencedHeap])
def test_the_other_machines_run_the_same_programs(heap_class) -> None:
    with open_world(4) as world:
        world.start_all(soak, 5, 150, False, heap_class=heap_class)
        assert all(isinstance(performed, int) for performed in world.results())


def test_fences_surround_every_signal() -> None:
    descriptor = SharedMemoryHeap.create(2, slot_bytes=4096)
    heaps = [FencedHeap.attach(descriptor, rank) for rank in range(2)]
    descriptor.unlink()
    sender, receiver = (GroupFreeComm(heap, timeout_s=1) for heap in heaps)
    sender.send(torch.zeros(3), 1)
    assert heaps[0].num_fences == 1  # release
    receiver.recv(torch.empty(3), 0)
    assert heaps[1].num_fences == 2  # acquire, and the release of the credit


def test_fences_by_machine() -> None:
    assert memory_fence("x86_64", "linux") is None
    assert memory_fence("AMD64", "win32") is None
    with pytest.raises(RuntimeError, match="no memory fence known"):
        memory_fence("sparc", "sunos")


def wakes(comm: GroupFreeComm) -> list[float]:
    """How long a sleeping receiver takes to notice."""
    delays = []
    stamp = torch.zeros(1, dtype=torch.float64)
    for _ in range(30):
        if comm.rank == 0:
            time.sleep(0.004)  # far beyond the spin
            comm.send(torch.tensor([time.monotonic()], dtype=torch.float64), 1)
        else:
            comm.recv(stamp, 0)
            delays.append(time.monotonic() - stamp.item())
    return delays


def test_a_sleeper_is_woken_not_polled() -> None:
    delays = sorted(run_ranks(wakes, 2)[1])
    assert delays[len(delays) // 2] < 0.01  # a lost wake-up would cost the rest of a 20 ms slice


@pytest.mark.skipif(not isinstance(default_waiter(), Futex), reason="no futex on this machine")
def test_futex() -> None:
    waiter, word = default_waiter(), ctypes.c_uint64(2**40 + 5)
    address = ctypes.addressof(word)
    begin = time.monotonic()
    waiter.wait(address, 2**40 + 6, 5.0, 0)  # another value already: no sleep
    assert time.monotonic() - begin < 1.0
    begin = time.monotonic()
    waiter.wait(address, 2**40 + 5, 0.05, 0)
    assert 0.04 < time.monotonic() - begin < 1.0

    def change() -> None:
        time.sleep(0.05)
        word.value += 1
        waiter.wake(address)

    thread = threading.Thread(target=change)
    thread.start()
    waiter.wait(address, 2**40 + 5, 5.0, 0)
    assert time.monotonic() - begin < 2.0
    thread.join()


def interrupted(comm: GroupFreeComm) -> None:
    """A wait that is interrupted leaves the lane free and the edge refusing, not half-done."""
    if comm.rank == 0:
        import signal

        def stop(*args) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            comm.recv(torch.empty(1), 1)
        comm.reset((1,))
        with pytest.raises(CommTimeout):
            comm.recv(torch.empty(1), 1)


def test_a_wait_can_be_interrupted() -> None:
    run_ranks(interrupted, 2, comm_timeout_s=0.5)
