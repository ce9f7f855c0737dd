"""Earliest deadline first, each task as narrow as its deadline allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec, RequestView, SchedulerView, TaskView
from gfdit.core.policy.changes import ReadyQueue
from gfdit.core.policy.ranks import FreeRanks


@dataclass
class Edf:
    """Earliest deadline first with best-fit parallelism, re-decided at every step.

    GF-DiT paper, section 5.4. Ready tasks are taken by priority, then by deadline, then by arrival, while ranks
    are free. Each gets the narrowest specification that finishes its request in time; if none does, the fastest
    that the free ranks allow. A request without a deadline comes after those that have one and stays narrow. No
    rank idles beside a task that it can run.
    """

    name = "edf"
    run_ahead = True
    queue_order = "deadline"
    _queue: ReadyQueue = field(default_factory=lambda: ReadyQueue(_urgency), init=False, repr=False)

    def schedule(self, view: SchedulerView) -> Decision:
        free = FreeRanks.of(view.ranks)
        dispatches = []
        for task in self._queue.of(view):
            spec = _best_fit(task, view, free.count(task.model))
            layout = spec and free.take(spec, task.model, view.requests[task.request_id].last_layout)
            if layout:
                dispatches.append(Dispatch((task.id,), layout))
                if not free:
                    break
        return Decision(tuple(dispatches))


def _urgency(request: RequestView) -> tuple[int, float]:
    return -request.priority, math.inf if request.deadline_s is None else request.deadline_s


def _best_fit(task: TaskView, view: SchedulerView, num_free: int) -> ParallelSpec | None:
    """The narrowest specification that meets the deadline, else the fastest; None if ``num_free`` are too few."""
    request = view.requests[task.request_id]
    specs = [spec for spec in view.cost.candidates(task) if spec.size <= num_free]
    if request.deadline_s is None or len(specs) <= 1:
        return specs[0] if specs else None
    fastest, fastest_s = specs[0], math.inf
    for spec in specs:
        remaining_s = view.cost.remaining_s(request, ExecutionLayout(tuple(range(spec.size)), spec))
        if view.now_s + remaining_s <= request.deadline_s:
            return spec
        if remaining_s < fastest_s:
            fastest, fastest_s = spec, remaining_s
    return fastest
