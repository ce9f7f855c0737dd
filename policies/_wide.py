"""How wide a task that is not a denoising step runs: mostly a decode, which a VAE in tiles can share.

Such a task is short, and a request has one of it. So it never waits for ranks, and takes more than its narrowest
specification only of ranks that nobody else has use for now. Policies that give a request a fixed group or an
equal share of the ranks let it decode on all of them.
"""

from __future__ import annotations

from gfdit.core import ExecutionLayout, ParallelSpec, SchedulerView, TaskView


def useful_times(task: TaskView, view: SchedulerView) -> tuple[tuple[ParallelSpec, ...], tuple[float, ...]]:
    """Candidates of ``task``, narrowest first, each faster than those before, and their times in seconds."""
    specs: list[ParallelSpec] = []
    times: list[float] = []
    for spec in view.cost.candidates(task):
        seconds = view.cost.task_s(task, ExecutionLayout(tuple(range(spec.size)), spec))
        if not times or seconds < times[-1]:
            specs.append(spec)
            times.append(seconds)
    return tuple(specs), tuple(times)


def fastest(task: TaskView, num_spare: int, view: SchedulerView) -> ParallelSpec:
    """The fastest candidate of ``task`` on at most ``num_spare`` ranks; the narrowest if none is so narrow."""
    candidates = view.cost.candidates(task)
    if len(candidates) == 1:
        return candidates[0]
    specs, _ = useful_times(task, view)
    return max((spec for spec in specs if spec.size <= num_spare), key=lambda spec: spec.size, default=specs[0])
