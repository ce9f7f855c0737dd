"""What a rank reports of tasks that are on a device together, when one of them fails there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gfdit.comm import CommAborted
from gfdit.core import ExecutionLayout, ParallelSpec, Task, TaskKind
from gfdit.core.commands import RunTask
from gfdit.core.events import TaskDelivering, TaskDispatched, TaskFailed, TaskFinished, TaskStarted
from gfdit.runtime import messages as msg
from gfdit.runtime.compute_lane import TaskWork
from gfdit.runtime.made_by import MadeBy
from gfdit.runtime.streams import Streams

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


class Beside:
    """Deliveries that are made when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def put(self, deliver: Callable[[], None]) -> None:
        self.waiting.append(deliver)

    def drain(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    close = drain


@dataclass
class Lane:
    """As much of a compute lane as its work knows."""

    rank: int = 0
    comm: DeviceComm = field(default_factory=DeviceComm)
    told: list[msg.WorkerMessage] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    made_by: MadeBy = field(default_factory=MadeBy)
    deliveries: Beside | None = None
    delivered: list[dict[str, bytes]] = field(default_factory=list)
    streams: Streams = field(default_factory=Streams)

    @property
    def reports(self) -> Any:
        return self

    executor = reports

    def tell(self, message: msg.WorkerMessage) -> None:
        self.told.append(message)

    def deliver(self, results: dict[str, bytes]) -> None:
        self.delivered += [results] if results else []

    def free(self, artifacts: tuple[str, ...]) -> None:
        self.freed += artifacts

    def has_failed(self, dispatch_id: int | None) -> bool:
        return dispatch_id in self.failures

    def note_failure(self, command: RunTask, error: Exception) -> None:
        self.failures.append(command.dispatch_id)

    def log_failure(self, command: RunTask, error: Exception) -> None:
        pass


def work(lane: Lane, number: int) -> TaskWork:
    task = Task(
        f"a/denoise/{number}",
        "a",
        TaskKind.DENOISE,
        number,
        (f"a/latents/{number}",),
        (f"a/latents/{number + 1}",),
    )
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


def decode(lane: Lane, results: Callable[[], dict[str, bytes]]) -> TaskWork:
    task = Task("a/decode", "a", TaskKind.DECODE, 0, ("a/latents/9",), ())
    decoding = TaskWork(lane, RunTask(9, (task,), PAIR, (), task.inputs))  # type: ignore[arg-type]
    decoding.results = results
    decoding.started(1.0)
    decoding.dispatched(1.5)
    decoding.finished(2.0)
    return decoding


def test_a_result_is_delivered_beside_the_next_task_and_told_when_it_is_whole() -> None:
    lane = Lane(deliveries=Beside())
    decode(lane, lambda: {"a": b"video"})
    assert lane.told[2:] == [TaskDelivering(9, 0)] and not lane.delivered and not lane.freed
    second = work(lane, 10)
    second.finished(3.0)
    assert outcome(lane, 10) is TaskFinished
    assert lane.deliveries is not None
    lane.deliveries.drain()
    assert lane.told[-1] == TaskFinished(9, 0, 1.0, (), 1.5, 2.0)
    assert lane.delivered == [{"a": b"video"}] and "a/latents/9" in lane.freed


def test_a_delivery_that_fails_is_its_own_failure_and_wakes_nobody() -> None:
    def fails() -> dict[str, bytes]:
        raise OSError("no space left in /dev/shm")

    lane = Lane(deliveries=Beside())
    decode(lane, fails)
    assert lane.deliveries is not None
    lane.deliveries.drain()
    assert isinstance(lane.told[-1], TaskFailed) and not lane.told[-1].caused_by_peer
    assert not lane.failures and not lane.freed


def test_other_ranks_of_a_decode_are_done_at_once() -> None:
    lane = Lane(rank=1, deliveries=Beside())
    decode(lane, dict)
    assert outcome(lane, 9) is TaskFinished and TaskDelivering(9, 1) not in lane.told


def test_what_is_read_as_a_whole_where_it_was_made_leaves_no_stream() -> None:
    lane = Lane()
    lane.streams.begin(1, ("a/latents/1",), {})
    lane.streams.emit("a/latents/1", torch.zeros(2))
    lane.streams.end()
    assert lane.streams.any_held
    work(lane, 1).finished(1.0)  # which consumes it
    assert lane.freed == ["a/latents/1"]
    assert not lane.streams.any_held
