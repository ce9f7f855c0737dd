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
    """Two ranks, the request on rank 0, every task and copy done as soon as it is asked for."""

    def __init__(self, group_size: int, **options: int) -> None:
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
