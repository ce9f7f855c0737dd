"""Steps of edits with different masks in one dispatch, and what they are taken to cost."""

from __future__ import annotations

import pytest

from gfdit.core import (
    ControlPlane,
    Decision,
    Dispatch,
    ExecutionLayout,
    ParallelSpec,
    RankRecord,
    Request,
    SchedulerView,
    Shape,
    trajectory,
)
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.core.cost.table import CostKey, TableCostModel
from gfdit.core.policy import batch_view
from gfdit.core.tasks import TaskKind

SINGLE = ParallelSpec(1)


def costs() -> CostTable:
    kinds = (TaskKind.ENCODE, TaskKind.PREPARE, TaskKind.DECODE)
    entries = [CostEntry("m", kind, 512, 512, 1, False, 1, 1, 1, 0.1) for kind in kinds]
    for batch, seconds in ((1, 1.0), (2, 1.6)):
        entries.append(CostEntry("m", TaskKind.DENOISE, 512, 512, 1, False, 1, 1, batch, seconds))
    return CostTable("test", "test", 0.0, 1e9, tuple(entries))


class Pairs:
    """One task after the other, then steps of all requests at once."""

    name = "pairs"

    def schedule(self, view: SchedulerView) -> Decision:
        if not view.free_ranks or not view.ready:
            return Decision()
        steps = [task.id for task in view.ready if task.kind is TaskKind.DENOISE]
        others = [task.id for task in view.ready if task.kind is not TaskKind.DENOISE]
        tasks = tuple(others[:1] or steps)
        return Decision((Dispatch(tasks, ExecutionLayout((0,))),))


def until_steps(*shapes: Shape) -> tuple[ControlPlane, list[cmd.Command]]:
    """The commands that begin the steps of requests of these shapes; at 10 s."""
    plane = ControlPlane(Pairs(), [RankRecord(0, frozenset("m"))], TableCostModel(costs()))
    commands: list[cmd.Command] = []
    for number, shape in enumerate(shapes):
        request = Request(f"r{number}", "m", shape, 1, 0.0)
        commands += plane.handle(ev.RequestArrived(request, trajectory(request.id, 1, (SINGLE,))), 10.0)
    for _ in range(4):  # to encode and prepare both
        (run,) = [command for command in commands if isinstance(command, cmd.RunTask)]
        commands = plane.handle(ev.TaskFinished(run.dispatch_id, 0, 0.1), 10.0)
    return plane, commands


def test_edits_share_steps_whatever_their_masks() -> None:
    shapes = [Shape(512, 512, computed_percent=percent) for percent in (20, 60)]
    plane, commands = until_steps(*shapes)
    (run,) = [command for command in commands if isinstance(command, cmd.RunTask)]
    assert [task.kind for task in run.tasks] == [TaskKind.DENOISE] * 2
    view = batch_view(plane.state.dispatches[run.dispatch_id].views)
    assert view.shape.computed_percent == 40
    expected_s = 1.6 * (0.05 + 0.95 * 0.4)
    assert plane.cost.task_s(view, ExecutionLayout((0,)), 2) == pytest.approx(expected_s)
    assert plane.state.ranks.views[0].busy_until_s == pytest.approx(10.0 + expected_s)
    plane.handle(ev.TaskFinished(run.dispatch_id, 0, 0.5), 10.5)
    assert isinstance(plane.cost, TableCostModel)
    (key,) = [key for key in plane.cost.measured if isinstance(key, CostKey) and key.kind is TaskKind.DENOISE]
    assert (key.shape, key.batch) == (view.shape, 2)


def test_other_sizes_do_not() -> None:
    _, commands = until_steps(Shape(512, 512, computed_percent=20), Shape(512, 768, computed_percent=20))
    (fault,) = [command.message for command in commands if isinstance(command, cmd.ReportFault)]
    assert "kind, model, shape and cfg must agree" in fault


def test_alike_tasks_are_themselves() -> None:
    plane, commands = until_steps(Shape(512, 512), Shape(512, 512))
    (run,) = [command for command in commands if isinstance(command, cmd.RunTask)]
    views = plane.state.dispatches[run.dispatch_id].views
    assert len(views) == 2 and batch_view(views) is views[0]
