"""What decides where the policy cannot: it raised, broke a rule, or does not come back."""

from __future__ import annotations

from gfdit.core.layouts import ExecutionLayout
from gfdit.core.policy.interface import Decision, Dispatch, SchedulerView


class FirstComeFirstServed:
    """Every ready task, the oldest first, at its narrowest specification on the free ranks that have its model.

    It knows no cost and keeps nothing: there is nothing that could go wrong.
    """

    run_ahead = True

    def __init__(self, instead_of: str) -> None:
        self.name = f"first come, first served instead of {instead_of}"

    def schedule(self, view: SchedulerView) -> Decision:
        free = list(view.free_ranks)
        resident = {rank.id: rank.resident for rank in view.ranks}
        dispatches = []
        for task in view.ready:
            spec = min(task.candidates, key=lambda spec: (spec.size, spec.sp))
            held = {rank for _, holders in task.artifacts for rank in holders}
            able = [rank for rank in free if task.model in resident[rank]]
            # Those that hold its inputs first: then there is less to move.
            ranks = tuple(sorted(sorted(able, key=lambda rank: (rank not in held, rank))[: spec.size]))
            if len(ranks) == spec.size:
                dispatches.append(Dispatch((task.id,), ExecutionLayout(ranks, spec)))
                free = [rank for rank in free if rank not in ranks]
        return Decision(tuple(dispatches))
