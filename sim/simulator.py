"""The control plane under a virtual clock: the same object and the same policies as in the server."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import NormalDist
from typing import Any

from gfdit.core import ControlPlane, Policy, RankRecord, Request, TaskGraph
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.components import Component
from gfdit.core.control.residency import Residency
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.nodes import Nodes
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy import batch_view
from gfdit.core.tasks import TaskKind, artifact_kind
from gfdit.observe.timeline import TimelineWriter
from gfdit.sim.coarse import CoarseCostModel, Rounding
from gfdit.sim.costs.edit_costs import Templates
from gfdit.sim.devices import Copy, Devices, Execution
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.options import SimulationOptions
from gfdit.sim.trace import TraceRequest

__all__ = ["SimulatedRequest", "SimulationOptions", "SimulationRun", "Simulator", "Status", "jitter_factor"]

MAX_WAKE_UPS = 100_000  # in a row, with nothing else happening: the policy waits for nothing
OUT_OF_MEMORY = "out of memory"
LOST_RANK = 503  # the status of requests that a lost rank has ended, as in the server
_NORMAL = NormalDist()


class Status(StrEnum):
    """How a request ended: ``FAILED`` by the policy's mistake, ``LOST`` with one rank after another.

    ``STARVED``: nothing was left to happen, and it had not ended.
    """

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    LOST = "lost"
    STARVED = "starved"


@dataclass(slots=True)
class SimulatedRequest:
    """``rank_seconds`` counts execution on every rank of its tasks; a batch's tasks share theirs equally.

    ``start_s`` is when the first of its tasks began that has ended.
    """

    trace: TraceRequest
    status: Status = Status.STARVED
    end_s: float | None = None
    detail: str = ""
    rank_seconds: float = 0.0
    start_s: float | None = None

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
    """What happened. ``requests`` are in the order of the trace, ``faults`` are the policy's mistakes.

    ``num_tasks`` counts those that began to run.
    """

    policy: str
    num_ranks: int
    requests: list[SimulatedRequest]
    num_tasks: int = 0
    num_migrations: int = 0
    num_loads: int = 0
    loaded_bytes: int = 0
    first_start_s: float = math.inf
    last_end_s: float = -math.inf
    faults: list[str] = field(default_factory=list)


class Simulator:
    """One run of ``trace``. Turns commands into later events; of events at one time the first queued comes first.

    Raises ``ValueError`` for a request that the table or the ranks cannot serve.
    """

    def __init__(
        self,
        policy: Policy,
        table: CostTable,
        trace: Sequence[TraceRequest],
        options: SimulationOptions,
        workflows: Callable[[Request], TaskGraph] | None = None,
        *,
        to_come: Sequence[TraceRequest] = (),
    ) -> None:
        """``workflows`` makes the graph of a request, whose ``model`` is then a workflow's name.

        Of ``to_come`` any may be submitted later (:meth:`submit`).
        """
        self._options = options
        self._timeline: TimelineWriter | None = None
        # The control plane corrects its model by what it measures; true times stay as they are.
        self._true_cost = _cost_model(table, options, options.nodes)
        shown = None if options.hides_nodes else options.nodes
        node_of = (lambda rank: 0) if shown is None else shown.of
        if options.nodes is not None:
            _check_exchanges(table)
        self._components = {one.name: one for one in options.components}
        self._failing = dict(options.component_failures)
        self._rounding = Rounding(options.steps_per_task) if options.steps_per_task > 1 else None
        if workflows is None:
            graphs = GraphBuilder(self._true_cost, options.num_ranks)
            for request in (*trace, *to_come):
                graphs.check(request.request())
            self._build: Callable[[Request], TaskGraph] = graphs.build
            models = frozenset(request.model for request in (*trace, *to_come))
            ranks = [RankRecord(rank, models, node_of(rank)) for rank in range(options.num_ranks)]
        else:
            if options.steps_per_task > 1:
                raise ValueError("steps_per_task is for one model a request: steps of workflows are single tasks")
            self._build = workflows
            held = Residency(options.components, options.component_bytes)
            ranks = [RankRecord(rank, held.initial(rank), node_of(rank)) for rank in range(options.num_ranks)]
        self._control = ControlPlane(
            policy,
            ranks,
            _cost_model(table, options, shown),
            run_ahead=options.run_ahead,
            components=options.components,
            component_bytes=options.component_bytes,
        )
        self._looks_ahead = options.run_ahead > 0
        self._devices = Devices(options)
        self._templates = None if options.edits is None else Templates(options.edits)
        self._lost: set[int] = set()
        self._withdrawn: deque[int] = deque()  # dispatches that the control plane has still to hear of
        self._requests = {request.id: SimulatedRequest(request) for request in trace}
        self._result = SimulationRun(policy.name, options.num_ranks, list(self._requests.values()))
        self._now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_queued = 0
        self._wake_at_s: float | None = None
        self._num_wake_ups = 0
        self._emitters: dict[type, Callable[[Any], None]] = {
            cmd.RunTask: self._run_task,
            cmd.WithdrawTask: self._withdraw,
            cmd.LoadComponent: self._load,
            cmd.Migrate: self._migrate,
            cmd.FreeArtifacts: lambda command: None,
            cmd.ResetEdges: self._reset_edges,
            cmd.StartRequest: lambda command: None,
            cmd.CompleteRequest: lambda c: self._end(c.request_id, Status.COMPLETED),
            cmd.RejectRequest: lambda c: self._end(c.request_id, Status.REJECTED, c.reason),
            cmd.FailRequest: self._fail,
            cmd.ReportFault: lambda c: self._result.faults.append(c.message),
            cmd.WakeAt: self._wake_at,
        }
        for request in trace:
            self._at(request.arrival_s, self._arrive, request)
        for failure in options.failures:
            self._at(failure.at_s, self._lose, failure.rank)
            if failure.down_s is not None:
                self._at(failure.until_s, self._join, failure.rank)

    def run(self, timeline: TimelineWriter | None = None) -> SimulationRun:
        """Until nothing is left to happen; to be called once."""
        self._timeline = timeline
        while self._queue:
            self._happen_next()
        return self.end()

    def submit(self, request: TraceRequest) -> None:
        """One that was not in the trace arrives, now that everything before it has happened (:meth:`advance`)."""
        assert request.id not in self._requests, request.id
        self._requests[request.id] = simulated = SimulatedRequest(request)
        self._result.requests.append(simulated)
        self._now_s = request.arrival_s
        self._arrive(request)

    def advance(self, until_s: float) -> None:
        """Let everything happen that happens before ``until_s``."""
        while self._queue and self._queue[0][0] < until_s:
            self._happen_next()

    def end(self) -> SimulationRun:
        """What has happened, now that nothing is left to happen."""
        assert not self._queue
        self._control.check_integrity()
        starved = {request.trace.id for request in self._result.requests if request.status is Status.STARVED}
        assert starved == self._control.state.requests.keys(), "a request was lost"
        assert starved or self._control.idle, "something is left that no request needs"
        return self._result

    @property
    def control(self) -> ControlPlane:
        """To look at."""
        return self._control

    @property
    def num_happened(self) -> int:
        """How far it is; may be read from another thread."""
        return self._num_queued - len(self._queue)

    @property
    def now_s(self) -> float:
        return self._now_s

    def _happen_next(self) -> None:
        self._now_s, _, happen, what = heapq.heappop(self._queue)
        happen(what)

    def _at(self, time_s: float, happen: Callable[[Any], None], what: Any) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (time_s, self._num_queued, happen, what))

    def _tell(self, event: ev.Event) -> None:
        """Hand an event in, and what follows from it at once."""
        self._handle(event)
        while self._looks_ahead and (self._withdrawn or self._control.wants_to_look_ahead):
            self._handle(ev.TaskWithdrawn(self._withdrawn.popleft()) if self._withdrawn else ev.LookAhead())

    def _handle(self, event: ev.Event) -> None:
        for command in self._control.handle(event, self._now_s):
            self._emitters[type(command)](command)
        if self._options.check_every_event:
            self._control.check_integrity()

    # What happens

    def _arrive(self, line: TraceRequest) -> None:
        self._num_wake_ups = 0
        request = line.request(computed_percent=self._computed_percent(line))
        if self._rounding is not None:
            request = self._rounding.of(request)
        self._tell(ev.RequestArrived(request, self._build(request)))

    def _computed_percent(self, line: TraceRequest) -> int:
        """An edit of nothing that was recorded leaves nothing out."""
        edits = self._options.edits
        if edits is None or self._templates is None or line.mask_ratio is None or line.template is None:
            return 100
        return edits.percent(line.mask_ratio, self._templates.use(line.template))

    def _finish(self, execution: Execution) -> None:
        if not self._devices.finish(execution):
            return
        self._num_wake_ups = 0
        self._account(execution)
        command = execution.command
        use, is_too_large = self._memory_use(command)
        if is_too_large:
            for rank in command.layout.ranks:
                self._tell(ev.TaskFailed(command.dispatch_id, rank, OUT_OF_MEMORY, out_of_memory=True))
            return
        for rank in command.layout.ranks:
            self._tell(ev.TaskFinished(command.dispatch_id, rank, execution.seconds, memory=use))

    def _finish_copy(self, copy: Copy) -> None:
        if self._devices.finish_copy(copy):
            self._end_copy(copy)

    def _end_copy(self, copy: Copy, error: str = "") -> None:
        command = copy.command
        for rank in command.ranks:
            if self._timeline is not None and copy.end_s > copy.start_s:
                self._timeline.record_migration(
                    rank, command.artifact, command.request_id, command.ranks, copy.start_s, copy.end_s
                )
            if rank not in self._lost:
                done = ev.MigrationFinished(command.migration_id, rank, error=error, caused_by_peer=bool(error))
                self._tell(done)

    def _lose(self, rank: int) -> None:
        """Peers notice at once; what waits for a copy that broke fails with it."""
        self._num_wake_ups = 0
        self._lost.add(rank)
        executions, copies = self._devices.lose(rank, self._now_s)
        self._tell(ev.RankLost(rank, "simulated"))
        for execution in executions:
            self._account(execution)
            command = execution.command
            message = f"rank {rank} was lost while it ran or copied for {command.tasks[0].id}"
            for member in command.layout.ranks:
                if member not in self._lost:
                    self._tell(ev.TaskFailed(command.dispatch_id, member, message, LOST_RANK, caused_by_peer=True))
        for copy in copies:
            self._end_copy(copy, f"rank {rank} was lost")

    def _join(self, rank: int) -> None:
        self._num_wake_ups = 0
        self._lost.discard(rank)
        self._tell(ev.RankJoined(rank))

    def _wake(self, at_s: float) -> None:
        if at_s != self._wake_at_s:
            return  # a later wish has replaced it
        self._wake_at_s = None
        self._num_wake_ups += 1
        self._tell(ev.WakeUp())

    # Commands

    def _wake_at(self, command: cmd.WakeAt) -> None:
        if command.at_s == self._wake_at_s:
            return  # already queued
        if self._num_wake_ups >= MAX_WAKE_UPS:
            self._result.faults.append(
                f"policy {self._result.policy!r} woke up {MAX_WAKE_UPS} times in a row without anything happening"
            )
            return
        self._wake_at_s = command.at_s
        self._at(command.at_s, self._wake, command.at_s)

    def _load(self, command: cmd.LoadComponent) -> None:
        """Dropping what is evicted takes no time."""
        component = self._components[command.component]
        self._result.num_loads += 1
        self._result.loaded_bytes += component.num_bytes
        end_s = self._now_s + self._options.dispatch_latency_s + component.load_s
        self._at(end_s, self._end_load, (command, component))

    def _end_load(self, what: tuple[cmd.LoadComponent, Component]) -> None:
        command, component = what
        if command.rank in self._lost:
            return
        self._num_wake_ups = 0
        if self._failing.get(component.name, 0) > 0:
            self._failing[component.name] -= 1
            self._tell(ev.ComponentLoaded(command.load_id, command.rank, error="simulated"))
        else:
            loaded = ev.ComponentLoaded(command.load_id, command.rank, component.load_s, component.num_bytes)
            self._tell(loaded)

    def _migrate(self, command: cmd.Migrate) -> None:
        self._result.num_migrations += 1
        if command.streamed:
            stream = self._devices.stream(command, self._now_s)
            self._at(stream.end_s, self._finish_copy, stream)
            return
        request = self._control.state.requests[command.request_id].request
        seconds = self._true_cost.copy_s(
            request.model,
            request.shape,
            request.cfg,
            artifact_kind(request.id, command.artifact),
            command.num_copies,
            0 if self._options.nodes is None else _num_between(command, self._options.nodes),
        )
        copy = self._devices.copy(command, seconds, self._now_s)
        self._at(copy.end_s, self._finish_copy, copy)

    def _run_task(self, command: cmd.RunTask) -> None:
        view = batch_view(self._control.state.dispatches[command.dispatch_id].views)
        seconds = self._true_cost.task_s(view, command.layout, len(command.tasks))
        if self._options.jitter:
            seconds *= jitter_factor(self._options.jitter, f"{self._options.seed} {view.id}")
        if self._memory_use(command)[1]:
            seconds = 0.0  # it fails at once
        execution = self._devices.execute(command, seconds, self._now_s)
        self._at(execution.end_s, self._finish, execution)

    def _memory_use(self, command: cmd.RunTask) -> tuple[ev.MemoryUse | None, bool]:
        """What a dispatch takes of a device, and whether that is more than there is."""
        if (memory := self._options.memory) is None:
            return None, False
        view = self._control.state.dispatches[command.dispatch_id].views[0]
        use = memory.use(view, command.layout.parallel, len(command.tasks))
        return use, memory.is_too_large(use)

    def _withdraw(self, command: cmd.WithdrawTask) -> None:
        if self._devices.withdraw(command.dispatch_id):
            self._withdrawn.append(command.dispatch_id)

    def _reset_edges(self, command: cmd.ResetEdges) -> None:
        self._at(self._now_s + self._options.dispatch_latency_s, self._finish_reset, command)

    def _finish_reset(self, command: cmd.ResetEdges) -> None:
        self._num_wake_ups = 0
        for rank in command.ranks:
            if rank not in self._lost:
                self._tell(ev.EdgesReset(command.reset_id, rank))

    def _fail(self, command: cmd.FailRequest) -> None:
        status = Status.LOST if command.status_code == LOST_RANK else Status.FAILED
        self._end(command.request_id, status, command.error)

    def _account(self, execution: Execution) -> None:
        run, command = self._result, execution.command
        layout, seconds = command.layout, execution.seconds
        if seconds == 0:
            return  # lost before it began
        run.num_tasks += len(command.tasks)
        if execution.start_s < run.first_start_s:
            run.first_start_s = execution.start_s
        if execution.end_s > run.last_end_s:
            run.last_end_s = execution.end_s
        share_s = seconds * len(layout.ranks) / len(command.tasks)
        for task in command.tasks:
            request = self._requests[task.request_id]
            request.rank_seconds += share_s
            if request.start_s is None:
                request.start_s = execution.start_s
            if self._timeline is not None:
                where = (task.id, task.request_id, task.kind, task.step_index, layout)
                for rank in layout.ranks:
                    self._timeline.record(rank, *where, execution.start_s, execution.end_s)

    def _end(self, request_id: str, status: Status, detail: str = "") -> None:
        request = self._requests[request_id]
        request.status, request.end_s, request.detail = status, self._now_s, detail


def _cost_model(table: CostTable, options: SimulationOptions, nodes: Nodes | None) -> TableCostModel:
    if options.steps_per_task > 1:
        return CoarseCostModel(table, options.steps_per_task, nodes=nodes)
    return TableCostModel(table, nodes=nodes)


def _check_exchanges(table: CostTable) -> None:
    """Raise ``ValueError`` if a layout across nodes has no price."""
    known = {exchanges.model for exchanges in table.exchanges}
    for entry in table.entries:
        if entry.task is TaskKind.DENOISE and entry.sp > 1 and entry.model not in known:
            raise ValueError(
                f"the cost table has no exchanges of {entry.model!r}: what layouts cost across nodes is unknown"
            )


def _num_between(command: cmd.Migrate, nodes: Nodes) -> int:
    """How often something goes to a rank of another node."""
    return sum([nodes.of(rank) != nodes.of(one.source) for one in command.transfers for rank in one.destinations])


def jitter_factor(spread: float, name: str) -> float:
    """A log-normal factor of mean 1 and relative spread about ``spread``, always the same for the same ``name``.

    From a hash and not from :mod:`random`, whose normal draws may differ between versions of Python. The name is
    that of seed and task alone: every policy meets the same luck.
    """
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    deviation = _NORMAL.inv_cdf((number + 0.5) / 2**48)
    return math.exp(spread * deviation - spread * spread / 2)
