"""A rank is free while the result of its last task is on its way, and what is promised on failure stays."""

from __future__ import annotations

import pytest

from gfdit.core import ControlPlane, RankRecord
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost.table import NominalCostModel
from gfdit.core.tasks import TaskKind
from gfdit.policies.fcfs import Fcfs
from tests.support.workload import make_request


class Driver:
    """Every task is done as soon as it is sent, but for decodes: these are in ``decodes``."""

    def __init__(self, num_ranks: int) -> None:
        ranks = [RankRecord(rank, frozenset("m")) for rank in range(num_ranks)]
        self.plane = ControlPlane(Fcfs(1), ranks, NominalCostModel())
        self.decodes: list[cmd.RunTask] = []
        self.ran: list[str] = []
        self.endings: list[cmd.Command] = []
        self.now_s = 0.0

    def tell(self, event: ev.Event) -> None:
        self.now_s += 1.0
        commands = self.plane.handle(event, self.now_s)
        self.plane.check_integrity()
        for command in commands:
            match command:
                case cmd.RunTask(tasks=(task, *_)) if task.kind is TaskKind.DECODE:
                    self.decodes.append(command)
                case cmd.RunTask(dispatch_id, tasks, layout):
                    self.ran += [task.id for task in tasks]
                    for rank in layout.ranks:
                        self.tell(ev.TaskFinished(dispatch_id, rank, 0.1))
                case cmd.ProbeRank(probe_id, rank):
                    self.tell(ev.RankProbed(probe_id, rank))
                case cmd.CompleteRequest() | cmd.FailRequest() | cmd.CancelRequest():
                    self.endings.append(command)

    def until_decoded(self, request_id: str) -> int:
        """Until the device is done with a request and its result is on its way."""
        self.tell(ev.RequestArrived(*make_request(request_id, num_steps=2)))
        number = self.decodes[-1].dispatch_id
        self.tell(ev.TaskDelivering(number, 0))
        return number


def test_the_next_request_runs_and_the_first_ends_when_its_result_is_there() -> None:
    driver = Driver(1)
    first = driver.until_decoded("a")
    assert driver.plane.state.ranks.free_in_order == (0,) and not driver.endings
    second = driver.until_decoded("b")
    assert driver.ran[-1].startswith("b/") and not driver.endings
    driver.tell(ev.TaskFinished(first, 0, 0.1))
    assert driver.endings == [cmd.CompleteRequest("a")]
    driver.tell(ev.TaskFinished(second, 0, 0.1))
    assert driver.endings[1:] == [cmd.CompleteRequest("b")] and driver.plane.idle


def test_without_the_event_the_rank_is_not_free() -> None:
    """Negative control."""
    driver = Driver(1)
    driver.tell(ev.RequestArrived(*make_request("a", num_steps=2)))
    assert driver.decodes and driver.plane.state.ranks.free_in_order == ()


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_result_that_is_lost_on_its_way_is_made_again(by_itself: bool) -> None:
    """By another rank, from the last boundary: nothing of the request was dropped."""
    driver = Driver(2)
    number = driver.until_decoded("a")
    driver.ran.clear()
    if by_itself:
        driver.tell(ev.TaskFailed(number, 0, "RuntimeError: no memory to share"))
        assert not driver.ran
    else:
        driver.tell(ev.RankLost(0, "killed"))
        assert driver.ran[0].startswith("a/")  # it ran on that rank alone
    again = driver.decodes[-1]
    assert again.dispatch_id != number and again.layout.ranks == (1,) and not driver.endings
    driver.tell(ev.TaskFinished(again.dispatch_id, 1, 0.1))
    assert driver.endings == [cmd.CompleteRequest("a")] and not driver.plane.state.dispatches


def test_a_request_that_is_cancelled_ends_with_its_delivery() -> None:
    driver = Driver(1)
    number = driver.until_decoded("a")
    driver.tell(ev.RequestCancelled("a"))
    assert not driver.endings
    driver.tell(ev.TaskFinished(number, 0, 0.1))
    assert driver.endings == [cmd.CancelRequest("a")] or driver.endings == [cmd.CompleteRequest("a")]
    assert driver.plane.idle


def test_a_delivery_that_is_told_twice_or_late_changes_nothing() -> None:
    driver = Driver(1)
    number = driver.until_decoded("a")
    driver.tell(ev.TaskDelivering(number, 0))
    driver.tell(ev.TaskFinished(number, 0, 0.1))
    driver.tell(ev.TaskDelivering(number, 0))
    assert driver.endings == [cmd.CompleteRequest("a")] and driver.plane.idle
