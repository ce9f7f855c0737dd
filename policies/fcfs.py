"""First come, first served, on worker groups of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gfdit.core import Decision, SchedulerView
from gfdit.policies._groups import WorkerGroups


@dataclass
class Fcfs:
    """First come, first served: fixed groups of ranks, each running one request at a time.

    The baseline of the GF-DiT paper (sections 5.4 and 6.1). Ranks form groups of ``group_size`` consecutive ids.
    Every task runs at its widest specification that fits its group, on the group's first ranks. With
    ``group_size`` the number of ranks this is static sequence parallelism with a FIFO queue; with 1 it is one
    request per rank. Groups are larger than ``group_size`` where a request needs more ranks.

    The paper assigns every task when it becomes ready, to the feasible group with the least estimated work queued:
    ``assign`` ``task``. A request may then change its group at every step, which copies what it holds. With
    ``request``, the default, a request goes, once, to the group with the least work ahead of it and stays: so do
    servers of fixed degrees (the baseline xDiT of the TetriServe paper). With one group both are the same.
    """

    group_size: int = 1
    assign: Literal["request", "task"] = "request"
    name = "fcfs"
    run_ahead = True

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        self._groups = WorkerGroups(self.group_size, by_task=self.assign == "task")

    def schedule(self, view: SchedulerView) -> Decision:
        self._groups.update(view)
        if self.assign == "task":
            self._groups.assign_tasks(view)
        ready = view.ready_by_request
        starts = []
        for group in self._groups.idle(view):
            tasks = (task for name in group.queue for task in ready.get(name, ()))  # oldest first
            starts.append(next((start for task in tasks if (start := self._groups.start(task, view))), None))
        return Decision(tuple([start for start in starts if start]))
