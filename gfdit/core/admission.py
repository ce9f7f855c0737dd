"""Admission: turn away on arrival what cannot meet its deadline behind the work that is queued."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Literal, get_args

from gfdit.core.estimates import Estimates
from gfdit.core.policy import Admission, Decision, Policy, RequestView, SchedulerView

AdmissionMode = Literal["none", "deadline"]
QueueOrder = Literal["arrival", "deadline", "shortest"]
"""Whom a policy serves first: its optional attribute ``queue_order``, ``arrival`` if it has none."""


def with_admission(policy: Policy, mode: str) -> Policy:
    """``policy`` under ``mode``; one with an ``admit`` of its own keeps it. ``ValueError`` for another mode."""
    if mode not in get_args(AdmissionMode):
        raise ValueError(f"admission must be {' or '.join(get_args(AdmissionMode))}, got {mode!r}")
    return policy if mode == "none" or hasattr(policy, "admit") else DeadlineAdmission(policy)


class DeadlineAdmission:
    """``policy``, which decides as before, with early rejection (LegoDiffusion paper, section 5.3).

    A new request is admitted if its estimated end is in time. The estimate serves the requests that the policy
    serves before it, each at its narrowest degree for what it has left, on the ranks that come free first, and
    then the new one at the degree at which it ends first. A request without a deadline is always admitted.
    """

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.queue_order: QueueOrder = getattr(policy, "queue_order", "arrival")
        self.run_ahead = getattr(policy, "run_ahead", False)
        self._policy = policy
        self._estimates = Estimates()

    def schedule(self, view: SchedulerView) -> Decision:
        return self._policy.schedule(view)

    def admit(self, request: RequestView, view: SchedulerView) -> Admission:
        """Rejects with the reason and, if it would fit an emptier machine, with how long to wait for that."""
        if request.deadline_s is None:
            return Admission.accept()
        allowed_s = max(0.0, request.deadline_s - view.now_s)
        alone_s = self._end_s(request, (), view)
        if alone_s > allowed_s:
            return Admission.reject(
                f"needs {alone_s:.1f} s on an idle machine, the deadline allows {allowed_s:.1f} s"
            )
        ahead = [other for other in view.requests.values() if self._is_ahead(other, request, view)]
        behind_s = self._end_s(request, ahead, view)
        if behind_s <= allowed_s:
            return Admission.accept()
        return Admission.reject(
            f"would take {behind_s:.1f} s behind {len(ahead)} requests, the deadline allows {allowed_s:.1f} s",
            retry_after_s=behind_s - allowed_s,
        )

    def _is_ahead(self, other: RequestView, request: RequestView, view: SchedulerView) -> bool:
        if self.queue_order == "arrival":
            return True
        if self.queue_order == "shortest":
            return self._left_s(other, view) <= self._left_s(request, view)
        deadline_s = math.inf if other.deadline_s is None else other.deadline_s
        return (-other.priority, deadline_s) <= (-request.priority, request.deadline_s or 0.0)

    def _left_s(self, request: RequestView, view: SchedulerView) -> float:
        """Time left at the narrowest degree."""
        times = self._estimates.of(request, view)
        return times.remaining_s(request, next(iter(times.step_s)))

    def _end_s(self, request: RequestView, ahead: Iterable[RequestView], view: SchedulerView) -> float:
        """Seconds from now to the estimated end of ``request``; infinite if no ranks can run it."""
        free_s = [0.0 for rank in view.ranks if request.model in rank.resident]
        heapify(free_s)
        for other in ahead:
            narrowest = next(iter(self._estimates.of(other, view).step_s))
            if narrowest.size <= len(free_s):
                starts_s = [heappop(free_s) for _ in range(narrowest.size)]
                for _ in starts_s:
                    heappush(free_s, starts_s[-1] + self._left_s(other, view))
        times = self._estimates.of(request, view)
        free_s.sort()
        ends_s = [
            free_s[s.size - 1] + times.remaining_s(request, s) for s in times.step_s if s.size <= len(free_s)
        ]
        return min(ends_s, default=math.inf)
