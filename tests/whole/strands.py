"""Many processes in one thread under a virtual clock: what in a server is a thread is a greenlet here.

A strand runs until it waits, and then the next thing happens that is due. Nothing else interrupts it, so a run is
the same whenever it is repeated.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet


class Host:
    """A process: its strands run while it has neither ended nor is stopped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.put_off: list[Callable[[], None]] = []  # what is due once it is not stopped any more

    def end(self) -> None:
        """At once and for good, as by SIGKILL: nothing of it runs again, not even what is in a ``finally``."""
        self.alive = False

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        put_off, self.put_off = self.put_off, []
        for resume in put_off:
            resume()


class Strand:
    """One thread of a host. It waits with :meth:`wait`; any other strand wakes it."""

    def __init__(self, scheduler: Scheduler, host: Host, name: str, body: Callable[[], None]) -> None:
        self.host = host
        self.name = name
        self._scheduler = scheduler
        self._turn = 0  # counts its waits: what was to end an earlier one is late
        self.greenlet = greenlet(lambda woken: body(), parent=scheduler.hub)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until :meth:`wake`, or False if the time is over first. To be called by the strand itself."""
        scheduler = self._scheduler
        if scheduler.closing or not self.host.alive:
            raise GreenletExit
        if timeout_s is not None:
            scheduler.after(max(0.0, timeout_s), self._resume, self._turn, False)
        return scheduler.hub.switch()

    def wake(self, delay_s: float = 0.0) -> None:
        self._scheduler.after(delay_s, self._resume, self._turn, True)

    def _resume(self, turn: int, woken: bool) -> None:
        host = self.host
        if turn != self._turn or not host.alive:
            return
        if host.stopped:
            host.put_off.append(lambda: self._resume(turn, woken))
            return
        self._turn += 1
        before, self._scheduler.current = self._scheduler.current, self
        self.greenlet.switch(woken)
        self._scheduler.current = before


class Scheduler:
    """What is due when. Of what is due at the same time the first that was asked for happens first."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.hub = getcurrent()
        self.current: Strand | None = None
        self.closing = False
        self._strands: list[Strand] = []
        self._due: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._num_due = 0

    def after(self, delay_s: float, happen: Callable[..., Any], *arguments: Any) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (self.time_s + delay_s, self._num_due, happen, arguments))

    def spawn(self, host: Host, name: str, body: Callable[[], None], delay_s: float = 0.0) -> Strand:
        strand = Strand(self, host, name, body)
        self._strands.append(strand)  # for good: the end of a greenlet that nobody knows would run its ``finally``
        strand.wake(delay_s)
        return strand

    def step(self) -> bool:
        """Let the next thing happen. False if nothing is due any more. Raises what a strand raises."""
        if not self._due:
            return False
        self.time_s, _, happen, arguments = heapq.heappop(self._due)
        happen(*arguments)
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Of the strand that runs now."""
        assert self.current is not None, "only strands wait"
        return self.current.wait(timeout_s)

    def sleep(self, seconds: float) -> None:
        """The strand that runs now does nothing else meanwhile."""
        assert self.current is not None, "only strands wait"
        until_s = self.time_s + seconds
        while self.time_s < until_s:
            self.current.wait(until_s - self.time_s)

    def vanish(self) -> None:
        """The strand that runs now never goes on."""
        self.hub.switch()

    def close(self) -> None:
        """No strand runs again; what they end with has nothing to act on."""
        self.closing = True
        for strand in self._strands:
            strand.host.end()
        for strand in self._strands:
            if strand.greenlet:  # it has begun, and not ended
                strand.greenlet.throw(GreenletExit)


class SimulatedCondition(threading.Condition):
    """Of strands. Nobody else runs while one of them holds it, so there is nothing to lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._waiting: list[Strand] = []

    def wait(self, timeout: float | None = None) -> bool:
        strand = self._scheduler.current
        assert strand is not None, "only strands wait"
        self._waiting.append(strand)
        return strand.wait(timeout)

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for strand in waiting:
            strand.wake()
