"""Shortest remaining time first, on worker groups with local queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gfdit.core import Decision, SchedulerView
from gfdit.policies._groups import WorkerGroups


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
        self._groups = WorkerGroups(
            1 if self.parallelism == "sp1" else None,
            urgency=lambda request, remaining_s: (-request.priority, remaining_s),
        )

    def schedule(self, view: SchedulerView) -> Decision:
        self._groups.update(view)
        ready = view.ready_by_request
        shortest = [
            next((ready[name][0] for name in group.queue if name in ready), None)
            for group in self._groups.idle(view)
        ]
        starts = [self._groups.start(task, view) for task in shortest if task]
        return Decision(tuple([dispatch for dispatch in starts if dispatch]))
