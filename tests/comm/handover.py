"""A slow rank that waits for an event, not for a while: what a race can do, it does on every run.

A negative control takes a safeguard away and must see the damage. If one of the two ranks merely sleeps, a busy
machine may hold up the other one for as long, and there is no damage to see. So the slow rank goes on when the
other one has ended its program, or looks in vain for something that the slow one is yet to do: by itself it can
do no more. Safeguards are waits, so with them the other rank stops there and no harm is done; without one it
stops later, after the harm. Neither depends on who runs how fast, and no time limit ends anything unless the
test is broken.
"""

from __future__ import annotations

from typing import Any

import torch

from gfdit.comm import SharedMemoryHeap
from gfdit.comm.futex import SleepWaiter, Waiter
from tests.comm.worlds import wait_until

# Of the looks that were counted after some moment, the first may have been made before it, and the last may have
# found what it was after. One of three was made after it, and in vain.
ONE_IN_VAIN = 3
LOOKS, ENDED, MET, NUM_WORDS = range(4)


class Handover:
    """One of two ranks' end. Both make theirs before any tensor of their heaps, which have room for tensors."""

    def __init__(self, heap: SharedMemoryHeap, other: int) -> None:
        own = heap.tensors.empty((NUM_WORDS,), torch.int64).zero_()
        begin = own.data_ptr() - heap.base_pointer(heap.rank)
        others = heap.segment(other)[begin : begin + own.nbytes].view(torch.int64)
        self._own, self._other = own.numpy(), others.numpy()
        self._wait: object = None
        self._enough = self._num_looks_since = 0

    def begin(self) -> None:
        """Both ranks are here, and begin a program."""
        self._own[ENDED] = 0
        self.meet()

    def end(self) -> None:
        """This rank's program has ended, well or not."""
        self._own[ENDED] = 1

    @property
    def others_looks(self) -> int:
        """How many there were so far."""
        return int(self._other[LOOKS])

    def let_the_other_go_on(self) -> None:
        """Return when the other rank has ended its program or needs something of this one to go on.

        Only one of the two may be in here at a time.
        """
        enough = self.others_looks + ONE_IN_VAIN
        assert wait_until(lambda: self._other[ENDED] or self.others_looks >= enough, pause_s=2e-4)

    def look(self, wait: object = None) -> bool:
        """Called at every look of this rank for something of the other's; says whether to look on is hopeless.

        It is if the other one, too, looks in vain, for something of this rank, which does nothing else while it
        waits. ``wait`` is one object for all looks of a wait, and another one for those of the next.
        """
        self._own[LOOKS] += 1
        if wait is not self._wait:
            self._wait, self._num_looks_since = wait, 0
            self._enough = self.others_looks + ONE_IN_VAIN
        self._num_looks_since += self.others_looks >= self._enough
        return self._num_looks_since >= ONE_IN_VAIN

    def meet(self) -> None:
        """Return when the other rank is here, too: told beside the collectives, which may be what is broken."""
        self._own[MET] += 1

        def both_here() -> bool:
            found = self._other[MET] >= self._own[MET]
            self.look(both_here)
            return found

        assert wait_until(both_here, pause_s=2e-4)


class LookingWaiter:
    """What the host's waits call after a look in vain."""

    def __init__(self, handover: Handover, waiter: Waiter) -> None:
        self.handover = handover
        self._waiter = waiter

    def wait(self, *args: Any) -> None:
        self.handover.look()
        self._waiter.wait(*args)

    def wake(self, address: int) -> None:
        self._waiter.wake(address)


class LookingHeap(SharedMemoryHeap):
    """A heap of two ranks whose waits count their looks, a few milliseconds apart."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handover = Handover(self, 1 - self.rank)
        self._waiter = LookingWaiter(self.handover, SleepWaiter())
