"""A policy in ten lines: oldest request first, each task as wide as the free ranks allow.

Try it: gfdit serve MODEL --ranks 4 --policy examples/my_policy.py:OldestWidest --policy-arg max_ranks=2
"""

from dataclasses import dataclass

from gfdit.core import Decision, Dispatch, ExecutionLayout, SchedulerView
from gfdit.core.layouts import widest


@dataclass
class OldestWidest:
    """Oldest request first, each task as wide as the free ranks allow."""

    max_ranks: int = 8
    name = "oldest-widest"
    run_ahead = True

    def schedule(self, view: SchedulerView) -> Decision:
        free, dispatches = list(view.free_ranks), []
        for task in view.ready:  # oldest request first
            if spec := widest(view.cost.candidates(task), min(len(free), self.max_ranks)):
                dispatches.append(Dispatch((task.id,), ExecutionLayout(tuple(free[: spec.size]), spec)))
                del free[: spec.size]
        return Decision(tuple(dispatches))
