"""Reports of ranks and the commands they answer, joined to what traces are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gfdit.core import ExecutionLayout, ParallelSpec, trajectory
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.transfers import Transfer
from gfdit.observe.traces import CopySpan, RequestEvent, TaskSpan
from gfdit.runtime import task_reports
from gfdit.runtime.task_reports import TaskReports

LAYOUT = ExecutionLayout((2, 0), ParallelSpec(2))
_, _, STEP, NEXT, _ = trajectory("r", 2, (ParallelSpec(2),)).tasks


class Reports:
    """With a control plane that only has books of what is under way."""

    def __init__(self) -> None:
        self.dispatches: dict[int, Any] = {}
        self.migrations: dict[int, Any] = {}
        plane: Any = SimpleNamespace(state=SimpleNamespace(dispatches=self.dispatches), migrations=self.migrations)
        self.of = TaskReports(plane, None, traces=True)

    def send(self, number: int, *tasks: Any, at_s: float, after: int | None = None) -> None:
        self.dispatches[number] = True
        self.of.sent(cmd.RunTask(number, tasks or (STEP,), LAYOUT, after=after), at_s)

    def end(self, number: int) -> None:
        """For the control plane."""
        self.dispatches.pop(number, None)
        self.migrations.pop(number, None)

    def taken(self, now_s: float = 0.0) -> list[Any]:
        traces = self.of.take(now_s)
        assert traces is not None and not traces.num_dropped
        return traces.facts


def test_a_task_lasts_from_its_first_rank_to_its_last() -> None:
    reports = Reports()
    reports.send(1, STEP, NEXT, at_s=1.0, after=0)
    reports.of.ran(ev.TaskFinished(1, 0, 2.0, finished_s=5.0))
    assert not reports.taken()
    reports.of.ran(ev.TaskFinished(1, 2, 1.5, finished_s=6.0))
    one, other = reports.taken()
    at = ("denoise", "", 0, (2, 0), 2, 1)
    assert one == TaskSpan("r", "r/denoise/0", *at, 2, 1, True, 1.0, 3.0, 6.0)
    assert (other.task, other.batch, other.start_s, other.end_s) == ("r/denoise/1", 2, 3.0, 6.0)
    assert not reports.taken()


def test_a_task_that_failed_runs_again() -> None:
    """What only echoes a peer's failure is no event of its own."""
    reports = Reports()
    reports.send(1, at_s=1.0)
    reports.of.failed(ev.TaskFailed(1, 0, "a peer failed", caused_by_peer=True), 2.0)
    reports.of.failed(ev.TaskFailed(1, 2, "a bug"), 2.5)
    reports.end(1)
    reports.send(2, at_s=4.0)
    failed, span, retry = reports.taken()
    assert failed == RequestEvent("r", "task_failed", 2.5, "r/denoise/0", 2, "a bug")
    assert (span.error, span.attempt, span.start_s, span.end_s) == ("a bug", 1, 1.0, 2.5)
    assert retry == RequestEvent("r", "retry", 4.0, "r/denoise/0")
    for rank in (0, 2):
        reports.of.ran(ev.TaskFinished(2, rank, 1.0, finished_s=6.0))
    reports.end(2)
    assert [(one.attempt, one.error) for one in reports.taken()] == [(2, "")]
    reports.of.ended("r")
    reports.send(3, at_s=7.0)
    assert not reports.taken(), "another request of that name has no past"


def test_a_rank_that_is_lost_is_an_event_of_the_requests_that_ran_there() -> None:
    reports = Reports()
    reports.send(1, at_s=1.0)
    reports.of.lost(1, "killed", 1.5)
    assert not reports.taken()
    reports.of.lost(2, "killed", 2.0)
    reports.end(1)
    reports.send(2, at_s=2.5)
    lost, retry, span = reports.taken(3.0)
    assert (lost.name, lost.rank, lost.detail, retry.name) == ("rank_lost", 2, "killed", "retry")
    assert (span.error, span.attempt, span.end_s) == ("rank 2 was lost: killed", 1, 3.0)


def test_a_task_that_was_taken_back_never_was() -> None:
    reports = Reports()
    reports.send(1, at_s=1.0)
    reports.send(2, NEXT, at_s=1.0, after=1)
    reports.of.withdrawn(ev.TaskWithdrawn(2))
    reports.end(2)
    reports.send(3, NEXT, at_s=2.0)
    assert not reports.taken()


def test_a_task_behind_one_that_failed_never_was_either() -> None:
    reports = Reports()
    reports.send(1, at_s=1.0, after=0)
    reports.end(1)
    assert not reports.taken()


def test_a_migration_has_the_bytes_of_all_its_ranks() -> None:
    reports = Reports()
    reports.migrations[1] = True
    transfers = (Transfer(0, (1, 2)), Transfer(3, (2,)))
    reports.of.sent_copy(cmd.Migrate(1, "r", "r/latents/1", (0, 3, 1, 2), transfers, LAYOUT, keep=True), 1.0)
    for rank, num_bytes in ((0, 0), (3, 0), (1, 10), (2, 15)):
        reports.of.moved(ev.MigrationFinished(1, rank, 0.5, num_bytes, finished_s=2.0 + rank))
    assert reports.taken() == [CopySpan("r", "r/latents/1", (0, 3), (1, 2), 25, True, 1.5, 5.0)]


def test_what_nobody_takes_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_reports, "MAX_FACTS", 2)
    reports = Reports()
    for number in range(3):
        reports.send(number, at_s=1.0)
    reports.of.lost(0, "killed", 2.0)
    traces = reports.of.take(3.0)
    assert traces is not None and (len(traces.facts), traces.num_dropped) == (2, 3)
    assert not reports.taken()


def test_without_traces_there_is_nothing_to_take() -> None:
    plane: Any = SimpleNamespace(state=SimpleNamespace(dispatches={}), migrations={})
    assert TaskReports(plane, None, traces=False).take(1.0) is None
