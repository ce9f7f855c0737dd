"""Device completion, apart from dispatch: what a lane has launched is watched by somebody else.

A lane never waits for its device. It says where work begins and ends in what it launches; a monitor tells the work
when the device has come to either.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Protocol

import torch

from gfdit.runtime.guard import ErrorHandler, start_guarded


class Work(Protocol):
    """Told in this order; times are readings of CLOCK_MONOTONIC."""

    def started(self, at_s: float) -> None:
        """The device has begun it."""

    def dispatched(self, at_s: float) -> None:
        """The host has launched all of it. Before or after ``started``, never after ``finished``."""

    def finished(self, at_s: float) -> None:
        """The device is done with it."""

    def broke(self, error: Exception) -> None:
        """Instead of ``finished``: the device has failed, and nothing can be said of the work."""


class CompletionMonitor(Protocol):
    """Of one lane, which calls ``begin`` before it launches some work and ``end`` after it; neither waits."""

    def begin(self, work: Work) -> None: ...

    def end(self, work: Work) -> None: ...

    def drain(self) -> None:
        """Wait until all work so far is finished and told."""

    def close(self) -> None:
        """Drain and stop."""


class Mark(Protocol):
    """A place in what a device was given to do."""

    def wait(self) -> float:
        """Sleep until the device gets there; returns when that was. Raises if the device has failed."""


class HostMonitor:
    """The host is the device: work has been done when it has been launched."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def begin(self, work: Work) -> None:
        work.started(self._clock())

    def end(self, work: Work) -> None:
        now_s = self._clock()
        work.dispatched(now_s)
        work.finished(now_s)

    def drain(self) -> None: ...

    def close(self) -> None: ...


class DeviceMonitor:
    """A thread that waits for marks in the order in which they were made.

    ``make_mark`` puts one behind everything launched so far; it is called on the lane's thread.
    """

    def __init__(self, make_mark: Callable[[], Mark], on_error: ErrorHandler = lambda _: None) -> None:
        """``on_error`` is told if the thread ends, of which nobody who waits for it would hear."""
        self._make_mark = make_mark
        self._begin: Mark | None = None
        self._watched: queue.Queue[tuple[Mark, Mark, Work] | None] = queue.Queue()
        self._thread = start_guarded(self._watch, name="gfdit-monitor", on_error=on_error)

    def begin(self, work: Work) -> None:
        self._begin = self._make_mark()

    def end(self, work: Work) -> None:
        assert self._begin is not None, "work ends that has not begun"
        begin, self._begin = self._begin, None
        end = self._make_mark()
        work.dispatched(time.monotonic())
        self._watched.put((begin, end, work))

    def drain(self) -> None:
        self._watched.join()

    def close(self) -> None:
        self._watched.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (watched := self._watched.get()) is not None:
            begin, end, work = watched
            try:
                work.started(begin.wait())
                at_s = end.wait()
            except Exception as error:
                work.broke(error)
            else:
                work.finished(at_s)
            finally:
                self._watched.task_done()


class CudaMarks:
    """CUDA events on the current stream, and their times on the host's clock.

    Times come from the device's clock, counted from an anchor that is renewed now and then: two of them are as far
    apart as the device says, not as far apart as a thread happened to notice.
    """

    _RENEW_S = 10.0

    def __init__(self) -> None:
        self._anchor: tuple[torch.cuda.Event, float] | None = None

    def make(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return _CudaMark(event, self)

    def time_of(self, event: torch.cuda.Event) -> float:
        """When the device came to ``event``, which it just has. Called by one thread."""
        now_s = time.monotonic()
        if self._anchor is None or now_s - self._anchor[1] > self._RENEW_S:
            self._anchor = event, now_s
        anchor, anchor_s = self._anchor
        return anchor_s + anchor.elapsed_time(event) / 1e3


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, marks: CudaMarks) -> None:
        self._event = event
        self._marks = marks

    def wait(self) -> float:
        self._event.synchronize()
        return self._marks.time_of(self._event)


def make_monitor(device: torch.device, on_error: ErrorHandler) -> CompletionMonitor:
    """The monitor of a lane that launches on ``device``; ``on_error`` is told if it cannot go on."""
    return DeviceMonitor(CudaMarks().make, on_error) if device.type == "cuda" else HostMonitor()
