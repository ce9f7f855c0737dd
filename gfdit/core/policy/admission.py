"""Admission: turn away on arrival what cannot meet its deadline behind the work that is queued."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from operator import itemgetter
from typing import Literal, get_args

from gfdit.core.layouts import SINGLE, ParallelSpec
from gfdit.core.policy import Admission, Decision, Policy, RequestView, SchedulerView
from gfdit.core.policy.estimates import Estimates, ServiceTimes

AdmissionMode = Literal["none", "deadline", "promise"]
QueueOrder = Literal["arrival", "deadline", "shortest"]
"""Whom a policy serves first: its optional attribute ``queue_order``, ``arrival`` if it has none."""


def with_admission(policy: Policy, mode: str) -> Policy:
    """``policy`` under ``mode``; one with an ``admit`` of its own keeps it. ``ValueError`` for another mode."""
    if mode not in get_args(AdmissionMode):
        raise ValueError(f"admission must be {', '.join(get_args(AdmissionMode))}, got {mode!r}")
    if mode == "none" or hasattr(policy, "admit"):
        return policy
    return DeadlineAdmission(policy, keeps_promises=mode == "promise")


class DeadlineAdmission:
    """``policy``, which decides as before, with early rejection (LegoDiffusion paper, section 5.3).

    A new request is admitted if its estimated end is in time; with ``keeps_promises`` only if that makes nobody
    late, or later, who can be in time. The estimate serves requests in the policy's order, each at its narrowest
    degree for what it has left, on the ranks that come free first; the new one at the narrowest degree at which it
    is in time. One without a deadline is always admitted.

    A policy that promises only a share of the ranks to deadlines says so with the attribute ``deadline_share``:
    more must not be admitted, or it gives up what was.
    """

    def __init__(self, policy: Policy, *, keeps_promises: bool = False) -> None:
        self.name = policy.name
        self.keeps_promises = keeps_promises
        self.queue_order: QueueOrder = getattr(policy, "queue_order", "arrival")
        self.run_ahead = getattr(policy, "run_ahead", False)
        self.sees_memory = getattr(policy, "sees_memory", False)
        self.places_components = getattr(policy, "places_components", False)
        self._share: float = getattr(policy, "deadline_share", 1.0)
        self._policy = policy
        self._estimates = Estimates()

    def schedule(self, view: SchedulerView) -> Decision:
        return self._policy.schedule(view)

    def admit(self, request: RequestView, view: SchedulerView) -> Admission:
        """Rejects with the reason and, if it would fit an emptier machine, with how long to wait for that."""
        if request.deadline_s is None:
            return Admission.accept()
        allowed_s = max(0.0, request.deadline_s - view.now_s)
        idle = self._idle(request, view)
        alone_s, _ = idle.best(request, self._estimates.of(request, view), allowed_s)
        if alone_s > allowed_s:
            return Admission.reject(
                f"needs {alone_s:.1f} s on an idle machine, the deadline allows {allowed_s:.1f} s"
            )
        others = sorted(view.requests.values(), key=lambda other: self._place(other, view))
        place = self._place(request, view)
        num_ahead = sum(self._place(other, view) <= place for other in others)
        line = self._idle(request, view)
        for other in others[:num_ahead]:
            self._serve(line, other, view)
        behind_s, spec = line.best(request, self._estimates.of(request, view), allowed_s)
        if behind_s > allowed_s:
            return Admission.reject(
                f"would take {behind_s:.1f} s behind {num_ahead} requests, the deadline allows {allowed_s:.1f} s",
                retry_after_s=behind_s - allowed_s,
            )
        if not self.keeps_promises:
            return Admission.accept()
        without = line.copy()
        line.serve(spec, self._estimates.of(request, view).remaining_s(request, spec))
        for other in others[num_ahead:]:
            left_s = math.inf if other.deadline_s is None else other.deadline_s - view.now_s
            end_s, end_without_s = self._serve(line, other, view), self._serve(without, other, view)
            if left_s < end_s > end_without_s and self._can_be_in_time(other, left_s, view):
                return Admission.reject(
                    f"would make another one {end_s - left_s:.1f} s late", retry_after_s=end_s - left_s
                )
        return Admission.accept()

    def _place(self, request: RequestView, view: SchedulerView) -> tuple[float, float]:
        """Where the policy serves it: the lowest first, the oldest of those that are alike."""
        if self.queue_order == "arrival":
            return (0.0, 0.0)
        if self.queue_order == "shortest":
            return (self._left_s(request, view), 0.0)
        return (-float(request.priority), math.inf if request.deadline_s is None else request.deadline_s)

    def _left_s(self, request: RequestView, view: SchedulerView) -> float:
        """Time left at the narrowest degree."""
        times = self._estimates.of(request, view)
        return times.remaining_s(request, next(iter(times.step_s)))

    def _serve(self, line: _Line, request: RequestView, view: SchedulerView) -> float:
        narrowest = next(iter(self._estimates.of(request, view).step_s))
        return line.serve(narrowest, self._left_s(request, view))

    def _can_be_in_time(self, request: RequestView, allowed_s: float, view: SchedulerView) -> bool:
        idle = self._idle(request, view)
        return idle.best(request, self._estimates.of(request, view), allowed_s)[0] <= allowed_s

    def _idle(self, request: RequestView, view: SchedulerView) -> _Line:
        """Components of workflows can come to any rank."""
        able = [rank for rank in view.ranks if request.parts is not None or request.model in rank.resident]
        return _Line([0.0 for _ in able], self._share)


class _Line:
    """Ranks that serve one request after the other; ``free_s`` says in how many seconds each comes free.

    Of the time that those before take, ``share`` goes to them.
    """

    def __init__(self, free_s: list[float], share: float) -> None:
        self._free_s = sorted(free_s)  # also a heap
        self._share = share

    def copy(self) -> _Line:
        return _Line(self._free_s, self._share)

    def serve(self, spec: ParallelSpec, seconds: float) -> float:
        """Seconds until the end of a request; zero where there are not ranks enough for it."""
        if spec.size > len(self._free_s):
            return 0.0
        starts_s = [heappop(self._free_s) for _ in range(spec.size)]
        for _ in starts_s:
            heappush(self._free_s, starts_s[-1] + seconds)
        return starts_s[-1] / self._share + seconds

    def best(self, request: RequestView, times: ServiceTimes, allowed_s: float) -> tuple[float, ParallelSpec]:
        """Until the end at the narrowest degree that is in time, or else the earliest; infinite if none fits."""
        free_s = sorted(self._free_s)
        ends = [
            (free_s[spec.size - 1] / self._share + times.remaining_s(request, spec), spec)
            for spec in times.step_s
            if spec.size <= len(free_s)
        ]
        in_time = [end for end in ends if end[0] <= allowed_s]
        return in_time[0] if in_time else min(ends, key=itemgetter(0), default=(math.inf, SINGLE))
