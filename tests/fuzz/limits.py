"""What one input may take: of processor time, so that a busy machine does not matter, and of memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CPU_S = 5.0
"""A hang is what has not ended after so much processor time; nothing here takes a tenth of a second."""
MEMORY_BYTES = 1 << 30
"""More than this process had before it began; an input has 64 KiB."""


class TakesTooLongError(BaseException):
    """Not an ``Exception``, so that nobody takes it for one of his own."""


@contextmanager
def bounded_time() -> Iterator[None]:
    """For one input. Raises :class:`TakesTooLongError` in the main thread, where Python code runs."""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@contextmanager
def watching_time() -> Iterator[None]:
    """Around all uses of :func:`bounded_time`."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TakesTooLongError(f"it has not ended after {CPU_S:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, too_long)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, before)


def bound_memory() -> None:
    """Of this process from now on: an allocation beyond it fails."""
    with open("/proc/self/statm") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
