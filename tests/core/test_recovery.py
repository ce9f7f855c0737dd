"""Where a request goes on after a rank was lost."""

from __future__ import annotations

import pytest

from gfdit.core import ControlPlane, RankRecord
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost_table import NominalCostModel
from gfdit.policies.fcfs import Fcfs
from tests.support.workload import make_request


class Driver:
    """Two ranks, the request on rank 0, every task and copy done as soon as it is asked for.

    But for copies of the artifacts in ``slow``: the last one of each is in ``copies``.
    """

    def __init__(self, group_size: int, **options: int) -> None:
        self.slow: tuple[str, ...] = ()
        self.copies: dict[str, cmd.Migrate] = {}
        ranks = [RankRecord(rank, frozenset("m")) for rank in range(2)]
        self.plane = ControlPlane(Fcfs(group_size), ranks, NominalCostModel(), **options)
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
                    for rank in command.layout.ranks:
                        self.tell(ev.TaskFinished(command.dispatch_id, rank, 0.1), until)
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
        driver.tell(ev.TaskFailed(dispatch, 1, "aborted", secondary=True))
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
