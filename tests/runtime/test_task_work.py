"""What a rank reports of tasks that are on a device together, when one of them fails there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from gfdit.comm import CommAborted
from gfdit.core import ExecutionLayout, ParallelSpec, Task, TaskKind
from gfdit.core.commands import RunTask
from gfdit.core.events import TaskDispatched, TaskFailed, TaskFinished, TaskStarted
from gfdit.runtime import messages as msg
from gfdit.runtime.compute_lane import TaskWork
from gfdit.runtime.made_by import MadeBy

PAIR = ExecutionLayout((0, 1), ParallelSpec(2))


class DeviceComm:
    """Collectives whose failure shows later: to the first that checks, and to nobody after."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.failed = False

    def check(self) -> None:
        if self.failed:
            self.num_failures += 1
            self.failed = False
            raise CommAborted(0, (1, 0))


@dataclass
class Lane:
    """As much of a compute lane as its work knows."""

    rank: int = 0
    comm: DeviceComm = field(default_factory=DeviceComm)
    told: list[msg.WorkerMessage] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    made_by: MadeBy = field(default_factory=MadeBy)

    @property
    def reports(self) -> Any:
        return self

    executor = reports

    def tell(self, message: msg.WorkerMessage) -> None:
        self.told.append(message)

    def deliver(self, results: dict[str, bytes]) -> None:
        assert not results

    def free(self, artifacts: tuple[str, ...]) -> None:
        self.freed += artifacts

    def has_failed(self, dispatch_id: int | None) -> bool:
        return dispatch_id in self.failures

    def note_failure(self, command: RunTask, error: Exception) -> None:
        self.failures.append(command.dispatch_id)


def work(lane: Lane, number: int) -> TaskWork:
    task = Task(f"a/denoise/{number}", "a", TaskKind.DENOISE, number, (f"a/latents/{number}",), ())
    command = RunTask(number, (task,), PAIR, (), task.inputs, after=number - 1)
    return TaskWork(lane, command)  # type: ignore[arg-type]


def outcome(lane: Lane, number: int) -> type:
    (message,) = [m for m in lane.told if isinstance(m, (TaskFinished, TaskFailed)) and m.dispatch_id == number]
    return type(message)


def test_reports_of_one_that_goes_well() -> None:
    lane = Lane()
    one = work(lane, 1)
    one.started(1.0)
    one.dispatched(1.5)
    one.finished(2.0)
    assert lane.told == [TaskStarted(1, 0), TaskDispatched(1, 0), TaskFinished(1, 0, 1.0, (), 1.5, 2.0)]
    assert lane.freed == ["a/latents/1"]


def test_a_failure_seen_when_the_task_is_over_is_its_own_and_that_of_the_one_behind() -> None:
    lane = Lane()
    first, second = work(lane, 1), work(lane, 2)
    lane.comm.failed = True
    first.finished(1.0)
    second.finished(2.0)
    assert outcome(lane, 1) is outcome(lane, 2) is TaskFailed
    assert lane.freed == []


@pytest.mark.parametrize("counted", [True, False])
def test_a_failure_that_the_next_launch_ran_into_fails_both(counted: bool) -> None:
    """Negative control: without counting, a task whose collective failed would pass for done."""
    lane = Lane()
    first, second = work(lane, 1), work(lane, 2)
    lane.comm.failed = True
    try:
        lane.comm.check()  # as every operation of the launch does
    except CommAborted as error:
        second.fail(error)
    if not counted:
        lane.comm.num_failures = 0
    first.finished(1.0)
    second.finished(2.0)
    assert outcome(lane, 2) is TaskFailed
    assert outcome(lane, 1) is (TaskFailed if counted else TaskFinished)


def test_what_was_launched_after_the_failure_was_told_is_not_concerned() -> None:
    lane = Lane()
    first = work(lane, 1)
    lane.comm.failed = True
    first.finished(1.0)
    later = work(lane, 7)  # behind another one, after a reset
    later.finished(2.0)
    assert outcome(lane, 7) is TaskFinished


def test_nothing_is_done_on_a_device_that_broke() -> None:
    lane = Lane()
    one = work(lane, 1)
    one.broke(RuntimeError("unspecified launch failure"))
    (message,) = lane.told
    assert isinstance(message, TaskFailed) and "unspecified launch failure" in message.error
    assert not message.caused_by_peer and lane.has_failed(1)
