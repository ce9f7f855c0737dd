"""Where a request goes on after a rank was lost."""

from __future__ import annotations

from typing import Any

import pytest

from gfdit.core import (
    ControlPlane,
    Decision,
    Dispatch,
    ExecutionLayout,
    ParallelSpec,
    Policy,
    RankRecord,
    SchedulerView,
)
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.views import UNKNOWN, ArtifactView, FieldView
from gfdit.core.cost.table import NominalCostModel
from gfdit.policies.fcfs import Fcfs
from tests.support.workload import make_request


class Driver:
    """Two ranks, the request on rank 0, every task and copy done as soon as it is asked for.

    But for copies of the artifacts in ``slow``: the last one of each is in ``copies``.
    """

    def __init__(self, policy: int | Policy, **options: Any) -> None:
        """``policy``: ``fcfs`` with groups of so many, or another one."""
        self.slow: tuple[str, ...] = ()
        self.latents = UNKNOWN
        self.copies: dict[str, cmd.Migrate] = {}
        ranks = [RankRecord(rank, frozenset("m")) for rank in range(2)]
        policy = Fcfs(policy) if isinstance(policy, int) else policy
        self.plane = ControlPlane(policy, ranks, NominalCostModel(), **options)
        self.ran: list[str] = []
        self.endings: list[cmd.Command] = []
        self.now_s = 0.0

    def tell(self, event: ev.Event, until: str = "") -> None:
        """``until``: the task before which to stop; it is then in flight."""
        self.now_s += 1.0
        commands = self.plane.handle(event, self.now_s)
        self.plane.check_integrity()
        for command in commands:
            if isinstance(command, cmd.RunTask):
                self.ran.append(command.tasks[0].id.partition("/")[2])
                if self.ran[-1] != until:
                    made = [name for task in command.tasks for name in task.outputs if "latents" in name]
                    views = tuple((name, self.latents) for name in made)
                    for rank in command.layout.ranks:
                        self.tell(ev.TaskFinished(command.dispatch_id, rank, 0.1, views), until)
            elif isinstance(command, cmd.Migrate) and command.artifact in self.slow:
                self.copies[command.artifact] = command
            elif isinstance(command, cmd.ResetEdges):
                for rank in command.ranks:
                    self.tell(ev.EdgesReset(command.reset_id, rank), until)
            elif isinstance(command, cmd.Migrate):
                for rank in command.ranks:
                    self.tell(ev.MigrationFinished(command.migration_id, rank), until)
            elif isinstance(command, (cmd.CompleteRequest, cmd.FailRequest)):
                self.endings.append(command)


@pytest.mark.parametrize(
    ("group_size", "options", "again"),
    [
        (1, {}, "encode"),
        (1, {"checkpoint_every_steps": 2}, "denoise/2"),
        (1, {"checkpoint_every_steps": 3}, "denoise/3"),
        (2, {}, "denoise/3"),
    ],
)
def test_it_goes_on_from_the_last_boundary_that_survives(
    group_size: int, options: dict[str, int], again: str
) -> None:
    driver = Driver(group_size, **options)
    driver.tell(ev.RequestArrived(*make_request("a", num_steps=5)), until="denoise/3")
    driver.ran.clear()
    driver.tell(ev.RankLost(0, "test"))
    if group_size > 1:  # its peer is woken
        (dispatch,) = driver.plane.state.dispatches
        driver.tell(ev.TaskFailed(dispatch, 1, "aborted", caused_by_peer=True))
    assert driver.ran[0] == again and driver.ran[-1] == "decode"
    assert driver.endings == [cmd.CompleteRequest("a")] and driver.plane.idle


class InFront:
    """Every task on rank 0, but the third step on both, rank 1 in front; all on rank 1 once it is alone."""

    name = "in front"

    def schedule(self, view: SchedulerView) -> Decision:
        if len(view.free_ranks) < len(view.ranks):
            return Decision()
        (task,) = view.ready
        layout = ExecutionLayout(view.free_ranks[:1])
        if task.step_index == 2 and len(view.free_ranks) == 2:
            layout = ExecutionLayout((1, 0), ParallelSpec(2))
        return Decision((Dispatch((task.id,), layout),))


SPLIT = ArtifactView((FieldView("latents", "float32", 4, (1, 8), sp_dim=1),))
WHOLE = ArtifactView((FieldView("latents", "float32", 4, (1, 8)),))


@pytest.mark.parametrize(("latents", "again"), [(WHOLE, "denoise/2"), (SPLIT, "prepare")])
@pytest.mark.parametrize("late", [False, True])
def test_a_copy_in_whose_place_a_part_has_come_is_not_gone_on_from(
    latents: ArtifactView, again: str, late: bool
) -> None:
    """The third step brings half of it to rank 1, where the whole is kept. ``late``: that is told afterwards."""
    driver = Driver(InFront(), checkpoint_every_steps=2)
    driver.latents = latents
    driver.slow = ("a/latents/2",) if late else ()
    driver.tell(ev.RequestArrived(*make_request("a", num_steps=5)), until="denoise/2")
    for number, copy in list(driver.plane.migrations.items()):
        for rank in copy.command.ranks:
            driver.tell(ev.MigrationFinished(number, rank), until="denoise/2")
    driver.ran.clear()
    driver.tell(ev.RankLost(0, "test"))
    (dispatch,) = driver.plane.state.dispatches
    driver.tell(ev.TaskFailed(dispatch, 1, "aborted", caused_by_peer=True))
    assert driver.ran[0] == again and driver.ran[-1] == "decode"
    assert driver.endings == [cmd.CompleteRequest("a")] and driver.plane.idle


def test_without_retries_it_fails_at_once() -> None:
    driver = Driver(1, max_retries=0)
    driver.tell(ev.RequestArrived(*make_request("a", num_steps=5)), until="denoise/3")
    driver.tell(ev.RankLost(0, "test"))
    (failure,) = driver.endings
    assert isinstance(failure, cmd.FailRequest) and failure.status_code == 503
    assert "rank 0 was lost: test" in failure.error


def test_a_copy_that_comes_late_is_not_freed_where_it_is_made_again() -> None:
    """The order would reach the rank when the artifact is new there."""
    first, second = "a/latents/1", "a/latents/2"
    driver = Driver(1, checkpoint_every_steps=1)
    driver.slow = (first, second)
    driver.tell(ev.RequestArrived(*make_request("a", num_steps=5)), until="denoise/2")
    driver.tell(ev.MigrationFinished(driver.copies[first].migration_id, 1, error="lost on its way"))
    driver.tell(ev.RankLost(0, "test"), until="denoise/0")
    assert driver.ran[-2:] == ["prepare", "denoise/0"], "there was nothing later to go on from"
    driver.tell(ev.MigrationFinished(driver.copies[second].migration_id, 1), until="denoise/0")
    driver.tell(ev.RankJoined(0), until="denoise/0")
    (dispatch,) = driver.plane.state.dispatches
    driver.tell(ev.TaskFinished(dispatch, 1, 0.1), until="denoise/1")
    assert driver.ran[-1] == "denoise/1", "it makes the second one again, on rank 1, where its copy is"
    copy = driver.copies[first]
    assert copy.target.ranks == (0,)
    commands = driver.plane.handle(ev.MigrationFinished(copy.migration_id, 0), driver.now_s)
    freed = [command for command in commands if isinstance(command, cmd.FreeArtifacts)]
    assert not any(second in command.artifacts for command in freed)
