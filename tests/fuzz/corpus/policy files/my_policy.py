"""A policy in ten lines: oldest request first, each task as wide as the free ranks allow.

Try it: gfdit serve MODEL --ranks 4 --policy examples/my_policy.py:OldestWidest --policy-arg max_ranks=2
"""

from dataclasses import dataclass

from gfdit.core import Decision, Dispatch, FreeRanks, SchedulerView
from gfdit.core.layouts import widest


@dataclass
class OldestWidest:
    """Oldest request first, each task as wide as the free ranks allow."""

    max_ranks: int = 8
    name = "oldest-widest"
    run_ahead = True

    def schedule(self, view: SchedulerView) -> Decision:
        free, dispatches = FreeRanks.of(view.ranks), []
        for task in view.ready:  # oldest request first
            most = min(free.count(task.model), self.max_ranks)
            if spec := widest(view.cost.candidates(task), most):
                last = view.requests[task.request_id].last_layout  # its ranks hold what the task needs
                if layout := free.take(spec, task.model, last):
                    dispatches.append(Dispatch((task.id,), layout))
        return Decision(tuple(dispatches))
