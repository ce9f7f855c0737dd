"""A test policy: every step on another layout."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gfdit.core import Decision, Dispatch, ExecutionLayout, SchedulerView


@dataclass
class RandomLayout:
    """Draws a random feasible degree on random free ranks, in random order, for every task.

    For tests: it moves every request at every step. The draw depends on ``seed``, the task and the free
    ranks alone, so a run repeats exactly.
    """

    seed: int = 0
    name = "random-layout"
    run_ahead = True

    def schedule(self, view: SchedulerView) -> Decision:
        free = {rank.id: rank for rank in view.ranks if rank.running_request is None}
        dispatches = []
        for task in view.ready:
            usable = [rank.id for rank in free.values() if task.model in rank.resident]
            specs = [spec for spec in view.cost.candidates(task) if spec.size <= len(usable)]
            if specs:
                draw = random.Random(f"{self.seed} {task.id}")
                spec = draw.choice(specs)
                ranks = tuple(draw.sample(usable, spec.size))
                dispatches.append(Dispatch((task.id,), ExecutionLayout(ranks, spec)))
                for rank in ranks:
                    del free[rank]
        return Decision(tuple(dispatches))
