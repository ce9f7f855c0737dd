"""The control plane under a virtual clock: the same object and the same policies as in the server."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gfdit.core import ControlPlane, Policy, RankRecord
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost_file import CostTable
from gfdit.core.cost_table import TableCostModel
from gfdit.observe.timeline import TimelineWriter
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.trace import TraceRequest

MAX_WAKE_UPS = 100_000  # in a row, with nothing else happening: the policy waits for nothing


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """``jitter`` is the relative spread of task times around the table's, ``seed`` that of its draws.

    A task starts ``dispatch_latency_s`` after the decision. ``check_every_event`` checks the control plane's
    bookkeeping after every event, not only at the end.
    """

    num_ranks: int
    dispatch_latency_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    check_every_event: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {self.num_ranks}")
        for name in ("dispatch_latency_s", "jitter"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a non-negative number, got {value}")


class Status(StrEnum):
    """How a request ended. ``STARVED``: nothing was left to happen, and it had not ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    STARVED = "starved"


@dataclass(slots=True)
class SimulatedRequest:
    """``rank_seconds`` counts execution on every rank of its tasks; a batch's tasks share theirs equally."""

    trace: TraceRequest
    status: Status = Status.STARVED
    end_s: float | None = None
    detail: str = ""
    rank_seconds: float = 0.0

    @property
    def latency_s(self) -> float | None:
        """From arrival to completion; None without one."""
        if self.status is not Status.COMPLETED or self.end_s is None:
            return None
        return self.end_s - self.trace.arrival_s

    def met_deadline(self, grace_s: float = 0.0) -> bool:
        """Completed in time; without a deadline, completed."""
        if (latency_s := self.latency_s) is None:
            return False
        return self.trace.deadline_s is None or latency_s <= self.trace.deadline_s + grace_s


@dataclass(slots=True)
class SimulationRun:
    """What happened. ``requests`` are in the order of the trace, ``faults`` are the policy's mistakes."""

    policy: str
    num_ranks: int
    requests: list[SimulatedRequest]
    num_tasks: int = 0
    num_migrations: int = 0
    first_start_s: float = math.inf
    last_end_s: float = -math.inf
    faults: list[str] = field(default_factory=list)


class Simulator:
    """One run of ``trace``. Turns commands into later events; of events at one time the first queued comes first.

    Raises ``ValueError`` for a request that the table or the ranks cannot serve.
    """

    def __init__(
        self, policy: Policy, table: CostTable, trace: Sequence[TraceRequest], options: SimulationOptions
    ) -> None:
        self._options = options
        self._timeline: TimelineWriter | None = None
        # The control plane corrects its model by what it measures; true times stay as they are.
        self._true_cost = TableCostModel(table)
        self._graphs = GraphBuilder(self._true_cost, options.num_ranks)
        for request in trace:
            self._graphs.check(request.request())
        models = frozenset(request.model for request in trace)
        ranks = [RankRecord(rank, models) for rank in range(options.num_ranks)]
        self._control = ControlPlane(policy, ranks, TableCostModel(table))
        self._requests = {request.id: SimulatedRequest(request) for request in trace}
        self._result = SimulationRun(policy.name, options.num_ranks, list(self._requests.values()))
        self._now_s = 0.0
        self._queue: list[tuple[float, int, ev.Event | TraceRequest]] = []
        self._num_queued = 0
        self._wake_at_s: float | None = None
        self._num_wake_ups = 0
        self._emitters: dict[type, Callable[[Any], None]] = {
            cmd.RunTask: self._run_task,
            cmd.Migrate: self._migrate,
            cmd.FreeArtifacts: lambda command: None,
            cmd.StartRequest: lambda command: None,
            cmd.CompleteRequest: lambda c: self._end(c.request_id, Status.COMPLETED),
            cmd.RejectRequest: lambda c: self._end(c.request_id, Status.REJECTED, c.reason),
            cmd.FailRequest: lambda c: self._end(c.request_id, Status.FAILED, c.error),
            cmd.ReportFault: lambda c: self._result.faults.append(c.message),
            cmd.WakeAt: self._wake_at,
        }
        for request in trace:
            self._at(request.arrival_s, request)

    def run(self, timeline: TimelineWriter | None = None) -> SimulationRun:
        """Until nothing is left to happen; to be called once."""
        self._timeline = timeline
        while self._queue:
            self._now_s, _, event = heapq.heappop(self._queue)
            if isinstance(event, TraceRequest):
                request = event.request()
                event = ev.RequestArrived(request, self._graphs.build(request))
            if not self._wanted(event):
                continue
            for command in self._control.handle(event, self._now_s):
                self._emitters[type(command)](command)
            if self._options.check_every_event:
                self._control.check_integrity()
        self._control.check_integrity()
        starved = {request.trace.id for request in self._result.requests if request.status is Status.STARVED}
        assert starved == self._control.state.requests.keys(), "a request was lost"
        assert starved or self._control.idle, "something is left that no request needs"
        return self._result

    def _at(self, time_s: float, event: ev.Event | TraceRequest) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (time_s, self._num_queued, event))

    def _wanted(self, event: ev.Event) -> bool:
        """False for a wake-up that a later one has replaced."""
        if not isinstance(event, ev.WakeUp):
            self._num_wake_ups = 0
            return True
        if self._now_s != self._wake_at_s:
            return False
        self._wake_at_s = None
        self._num_wake_ups += 1
        return True

    # Commands

    def _wake_at(self, command: cmd.WakeAt) -> None:
        if self._num_wake_ups >= MAX_WAKE_UPS:
            self._result.faults.append(
                f"policy {self._result.policy!r} woke up {MAX_WAKE_UPS} times in a row without anything happening"
            )
            return
        self._wake_at_s = command.at_s
        self._at(command.at_s, ev.WakeUp())

    def _migrate(self, command: cmd.Migrate) -> None:
        self._result.num_migrations += 1
        start_s, end_s = self._migration_times()
        for rank in command.ranks:
            self._at(end_s, ev.MigrationFinished(command.migration_id, rank))
            if self._timeline is not None:
                self._timeline.record_migration(
                    rank, command.artifact, command.request_id, command.ranks, start_s, end_s
                )

    def _migration_times(self) -> tuple[float, float]:
        start_s = self._now_s + self._options.dispatch_latency_s
        return start_s, start_s + self._true_cost.table.migration_latency_s

    def _run_task(self, command: cmd.RunTask) -> None:
        arrived_s, moved_s = self._migration_times()
        start_s = moved_s if command.migrations else arrived_s
        seconds = self._seconds(command)
        end_s = start_s + seconds
        for rank in command.layout.ranks:
            self._at(end_s, ev.TaskFinished(command.dispatch_id, rank, seconds))
        self._account(command, start_s, end_s, seconds)

    def _seconds(self, command: cmd.RunTask) -> float:
        """Execution time. Jitter depends on seed and task alone: every policy meets the same luck."""
        view = self._control.state.dispatches[command.dispatch_id].views[0]
        seconds = self._true_cost.task_s(view, command.layout, len(command.tasks))
        if jitter := self._options.jitter:
            draw = random.Random(f"{self._options.seed} {view.id}").gauss(0.0, 1.0)
            seconds *= math.exp(jitter * draw - jitter * jitter / 2)
        return seconds

    def _account(self, command: cmd.RunTask, start_s: float, end_s: float, seconds: float) -> None:
        run, layout = self._result, command.layout
        run.num_tasks += len(command.tasks)
        run.first_start_s = min(run.first_start_s, start_s)
        run.last_end_s = max(run.last_end_s, end_s)
        share_s = seconds * len(layout.ranks) / len(command.tasks)
        for task in command.tasks:
            self._requests[task.request_id].rank_seconds += share_s
            if self._timeline is not None:
                where = (task.id, task.request_id, task.kind, task.step_index, layout)
                for rank in layout.ranks:
                    self._timeline.record(rank, *where, start_s, end_s)

    def _end(self, request_id: str, status: Status, detail: str = "") -> None:
        request = self._requests[request_id]
        request.status, request.end_s, request.detail = status, self._now_s, detail
