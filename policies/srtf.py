"""Shortest remaining time first, on worker groups with local queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gfdit.core import Decision, SchedulerView, TaskView
from gfdit.policies._groups import Group, WorkerGroups


@dataclass
class Srtf:
    """Shortest remaining time first in per-rank queues; a request may be overtaken at every step.

    GF-DiT paper, section 5.4. A request goes, once, to the rank with the least work ahead of it; each rank runs
    the task of the request with the least estimated time left, among those of the most urgent priority. With
    ``parallelism`` ``widest`` (SRTF-SPmax) the queues belong to groups as large as the widest specification.
    """

    parallelism: Literal["sp1", "widest"] = "sp1"
    name = "srtf"
    run_ahead = True
    queue_order = "shortest"

    def __post_init__(self) -> None:
        self._groups = WorkerGroups(1 if self.parallelism == "sp1" else None)

    def schedule(self, view: SchedulerView) -> Decision:
        self._groups.update(view)
        idle = self._groups.idle(view)
        shortest: dict[Group, tuple[tuple[int, float], TaskView]] = {}
        for task in view.ready:
            group = self._groups.home(task.request_id)
            if group is not None and group in idle:
                urgency = self._urgency(task, view)
                if group not in shortest or urgency < shortest[group][0]:
                    shortest[group] = (urgency, task)
        starts = [self._groups.start(task, view) for _, task in shortest.values()]
        return Decision(tuple([dispatch for dispatch in starts if dispatch]))

    def _urgency(self, task: TaskView, view: SchedulerView) -> tuple[int, float]:
        return -view.requests[task.request_id].priority, self._groups.remaining_s(task.request_id, view)
