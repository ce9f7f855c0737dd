"""Several denoising steps as one task: a coarser simulation, which is faster in proportion.

A simulation spends its time on step boundaries, and at most of them nothing changes. What leaving some out costs:
requests give way to others, and change their layouts, at fewer moments, so that fewer deadlines are met; and a
request's steps are rounded to whole tasks, up or down so that over all requests none is gained or lost.
"""

from __future__ import annotations

from msgspec.structs import replace

from gfdit.core import ExecutionLayout, Request, TaskKind, TaskView
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.nodes import Nodes
from gfdit.core.cost.table import TableCostModel


class CoarseCostModel(TableCostModel):
    """Of tasks that are ``steps_per_task`` steps each; what is measured is learned for each step."""

    def __init__(self, table: CostTable, steps_per_task: int, *, nodes: Nodes | None = None) -> None:
        super().__init__(table, nodes=nodes)
        self._steps_per_task = steps_per_task

    def task_s(self, task: TaskView, layout: ExecutionLayout, batch: int = 1) -> float:
        seconds = super().task_s(task, layout, batch)
        return seconds * self._steps_per_task if task.kind is TaskKind.DENOISE else seconds

    def observe(self, task: TaskView, layout: ExecutionLayout, seconds: float, batch: int = 1) -> None:
        if task.kind is TaskKind.DENOISE:
            seconds /= self._steps_per_task
        super().observe(task, layout, seconds, batch)


class Rounding:
    """Turns steps into tasks of ``steps_per_task``. What one request has too many, later ones have too few."""

    def __init__(self, steps_per_task: int) -> None:
        self._steps_per_task = steps_per_task
        self._num_owed = 0  # steps that no task has been made of; negative: more than there were

    def of(self, request: Request) -> Request:
        """``request`` with as many steps as it has tasks; one at least, however few its steps are."""
        wanted = request.num_steps + self._num_owed
        num_tasks = max(1, round(wanted / self._steps_per_task))
        self._num_owed = max(wanted - num_tasks * self._steps_per_task, -self._steps_per_task)
        return replace(request, num_steps=num_tasks)
