"""A call that can stop anywhere below and go on later: a thread of its own, of which one at a time runs.

Threads and not greenlets, because torch keeps modes (no gradients, autocast, the current stream) per thread: what
a call has switched on must neither be left on for others nor be off when it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class KilledError(BaseException):
    """Unwinds a call that will not go on. No ``Exception``: what is being unwound must not handle it."""


class Coroutine:
    """``body()`` on a thread of its own. :meth:`resume` runs it until it suspends, ends or raises."""

    def __init__(self, body: Callable[[], Any], name: str) -> None:
        self._body: Callable[[], Any] | None = body
        self._wake, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._enter: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self.result: Any = None
        self.has_ended = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._started = False

    def resume(self, enter: Callable[[], None] | None = None) -> bool:
        """Go on until the body suspends; ``enter`` is called first, on its thread. Returns whether it has ended.

        Raises what the body raises.
        """
        assert not self.has_ended, "this call has ended"
        self._enter = enter
        if self._started:
            self._wake.release()
        else:
            self._started = True
            self._thread.start()
        self._back.acquire()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None
        return self.has_ended

    def suspend(self) -> None:
        """Called by the body: give control back to who called :meth:`resume`, until it does so again."""
        self._back.release()
        self._wake.acquire()
        if self._killed:
            raise KilledError
        if self._enter is not None:
            self._enter()

    def kill(self) -> None:
        """Unwind a suspended call; its ``finally`` clauses run before this returns."""
        if self._started and not self.has_ended:
            self._killed = True
            self._wake.release()
            self._back.acquire()
        self._end()

    def num_bytes(self) -> int:
        """Of the tensors that the suspended call's local variables hold, storages that are shared counted once."""
        storages: dict[int, int] = {}
        for value in self._locals():
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                try:
                    storage = value.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
                except (RuntimeError, NotImplementedError):  # a tensor without a storage
                    continue
        return sum(storages.values())

    def _locals(self) -> Iterator[Any]:
        import sys

        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            for value in list(frame.f_locals.values()):
                yield value
                if isinstance(value, (list, tuple)):
                    yield from value
                elif isinstance(value, dict):
                    yield from list(value.values())
            frame = frame.f_back

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                if self._enter is not None:
                    self._enter()
                assert self._body is not None, "this call has not ended"
                self.result = self._body()
        except KilledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._end()
            self._back.release()

    def _end(self) -> None:
        """What the body knows may know this object, and would wait for the garbage collector with all it holds."""
        self.has_ended = True
        self._body = self._enter = None
