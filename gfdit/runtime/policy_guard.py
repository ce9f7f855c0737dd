"""Bounds the time a policy may think: an endless loop in a policy must not stop the server."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gfdit.core import Admission, Decision, Policy, RequestView, SchedulerView

REPEAT_S = 0.2
MAX_REPEATS = 5
HANGING_POLICY_EXIT = 86
"""Exit code of a control process whose policy catches whatever is to stop it."""


class PolicyTimeoutError(Exception):
    """A policy did not answer in time; handled like any other exception it raises."""


class _OutOfTime(BaseException):
    """Not an ``Exception``: a policy that goes on whatever happens must not go on after this."""


class GuardedPolicy:
    """``policy`` with a time limit on every call; works in the main thread only (it uses a signal).

    One that is stopped may have taken in half of what it was shown: with ``make`` another takes its place, which
    knows nothing yet.

    A policy that catches even what is to stop it is told ``MAX_REPEATS`` times; then the process ends with
    ``HANGING_POLICY_EXIT``, since nothing else stops it, and the control process that takes its place does without
    the policy. So does one after a policy that hangs outside of Python, where no signal reaches it: the mark in
    ``mark_path`` says who was thinking when a process ended.
    """

    def __init__(
        self,
        policy: Policy,
        timeout_s: float,
        mark_path: Path | None = None,
        make: Callable[[], Policy] | None = None,
    ) -> None:
        self.name = policy.name
        self.run_ahead = getattr(policy, "run_ahead", False)
        self.sees_memory = getattr(policy, "sees_memory", False)
        self.places_components = getattr(policy, "places_components", False)
        self.timeout_s = timeout_s
        self.seconds: list[float] | None = None  # what decisions took, for who takes it from here
        self._policy, self._make = policy, make
        self._num_repeats = 0
        self._mark = _open_mark(mark_path) if mark_path is not None else bytearray(1)
        signal.signal(signal.SIGALRM, self._expire)
        if hasattr(policy, "admit"):
            self.admit = self._admit

    def schedule(self, view: SchedulerView) -> Decision:
        started_s = time.perf_counter()
        try:
            decision: Decision = self._ask("schedule", view)
            return decision
        finally:
            if self.seconds is not None:
                self.seconds.append(time.perf_counter() - started_s)

    def _admit(self, request: RequestView, view: SchedulerView) -> Admission:
        admission: Admission = self._ask("admit", request, view)
        return admission

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            with self._alarm():
                return getattr(self._policy, method)(*args)
        except PolicyTimeoutError:
            if self._make is not None:
                self._policy = self._make()
            raise

    @contextmanager
    def _alarm(self) -> Iterator[None]:
        self._num_repeats, self._mark[0] = 0, 1
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s, REPEAT_S)
        try:
            yield
        except _OutOfTime:
            raise PolicyTimeoutError(f"no decision within {self.timeout_s:g} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._mark[0] = 0

    def _expire(self, *_: Any) -> None:
        self._num_repeats += 1
        if self._num_repeats > MAX_REPEATS:
            os._exit(HANGING_POLICY_EXIT)
        raise _OutOfTime


def _open_mark(path: Path) -> mmap.mmap:
    """One byte that outlives this process: 1 while a policy thinks."""
    path.write_bytes(b"\0")
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def was_thinking(mark_path: Path) -> bool:
    """Whether the process that used ``mark_path`` ended, or hangs, in a call of its policy."""
    return mark_path.exists() and mark_path.read_bytes() == b"\1"
