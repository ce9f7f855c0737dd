"""Results on their way to the engine, beside the next task: copied from the device, packed and sent by a thread.

A video of 81 frames at 720p takes half a second of that, for which its rank would wait otherwise.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from gfdit.runtime.guard import ErrorHandler, start_guarded


class Deliveries(Protocol):
    """Of one lane: calls are made one after the other, in the order in which they were put."""

    def put(self, deliver: Callable[[], None]) -> None:
        """Returns before it is called, unless others wait already: results that wait take memory."""

    def drain(self) -> None:
        """Wait until all so far are over."""

    def close(self) -> None:
        """Drain and stop."""


class DeliveryThread:
    """While one result is being delivered one more may wait."""

    def __init__(self, around: Callable[[], AbstractContextManager[object]], on_error: ErrorHandler) -> None:
        """``around`` is entered in the thread: a stream of its own. ``on_error`` is told if the thread ends."""
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._around = around
        self._thread = start_guarded(self._run, name="gfdit-delivery", on_error=on_error)

    def put(self, deliver: Callable[[], None]) -> None:
        self._waiting.put(deliver)

    def drain(self) -> None:
        self._waiting.join()

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._around():
            while (deliver := self._waiting.get()) is not None:
                try:
                    deliver()
                finally:
                    del deliver  # and the result with it
                    self._waiting.task_done()
