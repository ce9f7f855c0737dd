"""Bounds the time a policy may think: an endless loop in a policy must not stop the server."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gfdit.core import Admission, Decision, Policy, RequestView, SchedulerView


class PolicyTimeoutError(Exception):
    """A policy did not answer in time; handled like any other exception it raises."""


class GuardedPolicy:
    """``policy`` with a time limit on every call; works in the main thread only (it uses a signal)."""

    def __init__(self, policy: Policy, timeout_s: float) -> None:
        self.name = policy.name
        self.run_ahead = getattr(policy, "run_ahead", False)
        self.sees_memory = getattr(policy, "sees_memory", False)
        self.timeout_s = timeout_s
        self._policy = policy
        signal.signal(signal.SIGALRM, self._expire)
        admit: Callable[[RequestView, SchedulerView], Admission] | None = getattr(policy, "admit", None)
        if admit is not None:
            self.admit = self._guarded(admit)

    def schedule(self, view: SchedulerView) -> Decision:
        with self._alarm():
            return self._policy.schedule(view)

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._alarm():
                return function(*args)

        return call

    @contextmanager
    def _alarm(self) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _expire(self, *_: Any) -> None:
        raise PolicyTimeoutError(f"no decision within {self.timeout_s:g} s")
